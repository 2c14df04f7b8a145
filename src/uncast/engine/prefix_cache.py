"""The prefix cache: a radix tree over full pages.

A node is one page; the path from the root to it spells the tokens of that page and of all before it, because a row depends on
every token up to its own. Two requests whose prompts begin with the same full pages walk the same path and share its pages.

Page ownership (pool refcounts): the tree owns each of its pages once, and every running request that uses one owns it once
more. A leaf whose page nobody else owns can be evicted, the least recently used first; then its parent may be a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from uncast.latent.pool import PagedPool

Key = tuple[int, ...]


class PrefixNode:
    """One full page in the tree; `alive` is False once it was evicted (a request may still point at it)."""

    __slots__ = ("alive", "children", "key", "last_used", "page", "parent")

    def __init__(self, parent: PrefixNode | None, key: Key, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[Key, PrefixNode] = {}
        self.last_used, self.alive = 0, True


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens they stand for."""

    def __init__(self, pool: PagedPool) -> None:
        self.pool = pool
        self.root = PrefixNode(None, (), -1)
        self._leaves: set[PrefixNode] = set()
        self._size, self._clock = 0, 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._size

    def match(self, tokens: Seq[int], limit: int) -> tuple[list[int], PrefixNode]:
        """The longest known path of full pages within `tokens[:limit]`.

        Returns:
            Its pages, each owned once more (the caller releases them), and its last node.
        """
        node, pages, size = self.root, [], self.pool.page_size
        self._clock += 1
        for start in range(0, limit - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            child.last_used = self._clock
            pages.append(child.page)
            node = child
        self.pool.retain(pages)
        return pages, node

    def extend(self, node: PrefixNode, key: Key, page: int) -> PrefixNode:
        """The child of `node` for the tokens `key`; made from `page`, which the tree then owns too, if it is not there.

        If it is there (another request computed the same tokens meanwhile), the caller's `page` stays the caller's alone.
        """
        self._clock += 1
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = PrefixNode(node, key, page)
            self.pool.retain([page])
            self._leaves.discard(node)
            self._leaves.add(child)
            self._size += 1
        child.last_used = self._clock
        return child

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that no request uses, least recently used first; returns how many."""
        freed = 0
        while freed < count:
            idle = sorted((leaf for leaf in self._leaves if self._idle(leaf)), key=lambda leaf: leaf.last_used)
            if not idle:
                break
            # A parent that becomes a leaf was used no earlier than its child: it waits for the next round.
            for leaf in idle[: count - freed]:
                self._remove(leaf)
                freed += 1
        return freed

    def pages(self) -> list[int]:
        """Every page the tree owns, each once."""
        found, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            found.append(node.page)
            stack.extend(node.children.values())
        return found

    def _idle(self, leaf: PrefixNode) -> bool:
        return self.pool.refcount(leaf.page) == 1

    def _remove(self, leaf: PrefixNode) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children
        del parent.children[leaf.key]
        self._leaves.discard(leaf)
        if parent is not self.root and not parent.children:
            self._leaves.add(parent)
        leaf.alive = False
        self._size -= 1
        self.pool.release([leaf.page])
