"""Forests of drafted tokens, as indices of parents."""

from hypothesis import strategies as st

# Parents before children, -1 for a root.
forests = st.lists(st.integers(-1, 30), min_size=1, max_size=12).map(
    lambda parents: [min(parent, at - 1) for at, parent in enumerate(parents)]
)


def path(parents, node):
    """Nodes from the root to `node`."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]
