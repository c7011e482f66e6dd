"""HeadSplit: which query heads, and which heads of keys and values, each rank of a tensor group has."""

from __future__ import annotations

from dataclasses import dataclass

from tplayers.placement import PaddedFeatures, require_divisible


@dataclass(frozen=True)
class HeadSplit:
    """How ``groups`` heads of keys and values, each with ``queries`` query heads, lie on ``ranks`` ranks.

    Each group is padded to ``padded_queries`` query heads, and the groups to ``padded_groups``, with heads of zeros.
    Either ``ranks`` divides the padded groups, or these divide ``ranks``; then ranks share a group. The real heads are
    first in both.
    """

    ranks: int
    groups: int
    queries: int
    padded_groups: int
    padded_queries: int

    @property
    def sharing(self) -> int:
        """The ranks that share a group."""
        return max(self.ranks // self.padded_groups, 1)

    @property
    def local_heads(self) -> int:
        """The query heads of a rank."""
        return self.padded_groups * self.padded_queries // self.ranks

    @property
    def local_groups(self) -> int:
        """The heads of keys and values with which a rank computes."""
        return max(self.padded_groups // self.ranks, 1)

    def heads(self, rank: int) -> range:
        """The numbers of the query heads of ``rank``. A head of zeros may have the number of another head."""
        if self.sharing == 1:
            return range(rank * self.local_heads, (rank + 1) * self.local_heads)
        first = rank // self.sharing * self.queries + rank % self.sharing * self.local_heads
        return range(first, first + self.local_heads)

    def real_heads(self, rank: int) -> int:
        """How many of the query heads of ``rank`` are to be used: those of zeros in a group of real keys are not.

        Their queries are 0, but the keys and values are not, so their context is not 0, either. A group of zeros needs
        no such care.
        """
        if self.sharing == 1:
            return self.local_heads
        return min(max(self.queries - rank % self.sharing * self.local_heads, 0), self.local_heads)

    def query_features(self, head_size: int) -> PaddedFeatures:
        """The output features of the queries' layer, and the input features of the projection."""
        if self.queries == self.padded_queries:  # all zeros come last
            group = self.queries * head_size
            return PaddedFeatures((self.groups * group,), (self.padded_groups * group,))
        return PaddedFeatures(
            (self.groups, self.queries * head_size), (self.padded_groups, self.padded_queries * head_size)
        )

    def group_features(self, head_size: int) -> PaddedFeatures:
        """The output features of the layer of keys, or of values."""
        return PaddedFeatures((self.groups * head_size,), (self.padded_groups * head_size,))


def split_heads(ranks: int, heads: int, groups: int, head_size: int, *, pad: bool = False) -> HeadSplit:
    """How ``groups`` heads of keys and values of size ``head_size`` serve ``heads`` query heads on ``ranks`` ranks.

    pad: heads of zeros are added where they are needed, as few as possible. Without padding ``ranks`` must divide the
    heads, and divide the groups or be a multiple of them. Raises ValueError, with the sizes that would work.
    """
    if not 1 <= groups <= heads or heads % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"num_query_groups={groups} does not divide num_attention_heads={heads}; {fitting} do")
    queries = heads // groups
    if pad:
        # Ranks divide the groups, or an equal number of ranks shares each group. The second needs queries to share.
        shared = [n for n in range(groups, ranks) if ranks % n == 0 and head_size % (ranks // n) == 0]
        found = [(-(-groups // ranks) * ranks, queries)]
        if queries > 1:
            found += [(n, -(-queries // (ranks // n)) * (ranks // n)) for n in shared]
        return HeadSplit(ranks, groups, queries, *min(found, key=lambda one: (one[0] * one[1], one[0])))
    require_divisible(ranks, num_attention_heads=heads)
    if queries > 1 and groups % ranks and ranks % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
        raise ValueError(
            f"tensor-model-parallel size {ranks} neither divides num_query_groups={groups} nor is a multiple of it; "
            f"sizes that would work: {fitting}"
        )
    if ranks > groups and head_size % (ranks // groups):
        raise ValueError(
            f"tensor-model-parallel size {ranks}: {ranks // groups} ranks share each of num_query_groups={groups} "
            f"heads of keys and values, and do not divide its size kv_channels={head_size}"
        )
    return HeadSplit(ranks, groups, queries, groups, queries)
