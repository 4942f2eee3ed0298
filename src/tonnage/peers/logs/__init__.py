"""Start-up logs of other engines: read, checked against themselves, and set beside a prediction."""

from tonnage.peers.logs.log import Failure, Figure, Log, Unit
from tonnage.peers.logs.reading import read_log

__all__ = ["Failure", "Figure", "Log", "Unit", "read_log"]
