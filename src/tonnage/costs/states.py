"""What a recurrent layer keeps for one sequence, per rank: the last inputs of its convolution, and its matrix.

Sizes as the spec of such models has them, in elements: the convolution keeps ``kernel - 1`` inputs of each channel,
the matrix has ``heads * head_dim * state_size`` elements. Heads are divided over the tensor-parallel ranks; keys,
queries, B and C are shared by groups of heads, and a group that more than one rank needs is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.costs.layers import Attention, Recurrent
from tonnage.costs.ranks import attention_ranks
from tonnage.terms import Rank
from tonnage.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The two arrays of one layer and one sequence; a dimension of 0 means: there is none.

    conv   (inputs kept, channels), in the dtype of the weights
    ssm    (heads, head_dim, state_size), in the dtype of states
    """

    conv: tuple[int, int]
    ssm: tuple[int, int, int]


def state_shape(mixer: Recurrent, rank: Rank) -> StateShape:
    """One rank's share. Heads are whole: ``ranks.rank_shape`` has refused a split that cuts them."""
    ranks = attention_ranks(rank)
    heads = mixer.num_heads // ranks
    own = mixer.num_heads * mixer.head_dim if mixer.conv_channels else 0
    shared = (mixer.conv_channels - own) // mixer.num_groups
    channels = own // ranks + shared * ceil_div(mixer.num_groups, ranks)
    return StateShape(conv=(mixer.conv_kernel - 1, channels), ssm=(heads, mixer.head_dim, mixer.state_size))


def compressor_shape(mixer: Attention) -> tuple[int, int]:
    """(tokens, elements), float32: what compressed attention keeps of tokens that no entry stands for yet.

    A value and a gate for each element of an entry. With an indexer the entries overlap: two series of both, for the
    entry and for the indexer's key, over the tokens of two entries.
    """
    if mixer.index_head_dim:
        return 2 * mixer.compress_ratio, 4 * (mixer.head_dim + mixer.index_head_dim)
    return mixer.compress_ratio, 2 * mixer.head_dim
