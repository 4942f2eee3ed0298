"""SGLang's start: a static fraction of what is free before the weights, cut into pools; all else lives off the rest."""
