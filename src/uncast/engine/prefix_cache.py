"""The prefix cache: a radix tree over full pages.

A node is one page; the path from the root to it spells the tokens of that page and of all before it, because a row depends on
every token up to its own. Two requests whose prompts begin with the same full pages walk the same path and share its pages.

Page ownership (pool refcounts): the tree owns each of its pages once, and every running request that uses one owns it once
more. A request that owns a node's page owns those of all nodes above it, so below an idle node (refcount 1) all are idle, and
every idle page can be evicted: leaves first, the least recently used first.

With an MTP layer (`lookahead`) a page is known by its tokens and the one after them, because its last row in that layer depends
on it. Pages of requests whose MTP rows were not kept up are marked: whoever finds one does not draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from uncast.latent.pool import PagedPool

Key = tuple[int, ...]


class PrefixNode:
    """One full page in the tree.

    Attributes:
        drafts: the page's rows in the MTP layer are there, too, as are those of all nodes above.
    """

    __slots__ = ("children", "drafts", "key", "last_used", "page", "parent")

    def __init__(self, parent: PrefixNode | None, key: Key, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[Key, PrefixNode] = {}
        self.last_used = 0
        self.drafts = True


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens they stand for.

    Attributes:
        lookahead: 1 where a page's key has the token after the page as well, else 0.
    """

    def __init__(self, pool: PagedPool, *, lookahead: bool = False) -> None:
        self.pool, self.lookahead = pool, int(lookahead)
        self.root = PrefixNode(None, (), -1)
        self._leaves: set[PrefixNode] = set()
        self._size, self._clock = 0, 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._size

    def key(self, tokens: Seq[int], index: int) -> Key:
        """What page number `index` of a request with these tokens is known by."""
        size = self.pool.page_size
        return tuple(tokens[index * size : (index + 1) * size + self.lookahead])

    def match(self, tokens: Seq[int], limit: int) -> tuple[list[int], PrefixNode]:
        """The longest known path of full pages within `tokens[:limit]`; with lookahead there must be a token at `limit`.

        Returns:
            Its pages, each owned once more (the caller releases them), and its last node.
        """
        node, pages, size = self.root, [], self.pool.page_size
        self._clock += 1
        for start in range(0, limit - size + 1, size):
            child = node.children.get(self.key(tokens, start // size))
            if child is None:
                break
            child.last_used = self._clock
            pages.append(child.page)
            node = child
        self.pool.retain(pages)
        return pages, node

    def extend(self, node: PrefixNode, key: Key, page: int, *, drafts: bool = True) -> PrefixNode | None:
        """Makes `page`, which the caller owns, the page of `node`'s child for the tokens `key`; the tree then owns it too.

        A child that is there already has a page of its own. If that is idle, `page` takes its place. If other requests use it
        and its bytes are the same, the child is returned as it is: the caller has to exchange `page` for `child.page` (see
        `exchange`). If the bytes differ (rounding in another batch), neither can replace the other: None.
        """
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = PrefixNode(node, key, page)
            child.drafts = drafts and node.drafts
            self.pool.retain([page])
            self._leaves.discard(node)
            self._leaves.add(child)
            self._size += 1
        elif child.page != page and self._idle(child):
            self.pool.retain([page])
            self.pool.release([child.page])
            child.page, child.drafts = page, drafts and node.drafts
        elif child.page != page and not self._same_bytes(child.page, page):
            return None
        self._clock += 1
        child.last_used = self._clock
        return child

    def exchange(self, child: PrefixNode, page: int) -> int:
        """Trades the caller's ownership of `page` for one of `child.page`, which it returns."""
        self.pool.retain([child.page])
        self.pool.release([page])
        return child.page

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

    def _idle(self, node: PrefixNode) -> bool:
        return self.pool.refcount(node.page) == 1

    def _same_bytes(self, first: int, second: int) -> bool:
        layers = (layer for storage in self.pool.storages for layer in storage)
        return all(torch.equal(layer[first], layer[second]) for layer in layers)

    def _remove(self, leaf: PrefixNode) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children
        del parent.children[leaf.key]
        self._leaves.discard(leaf)
        if parent is not self.root and not parent.children:
            self._leaves.add(parent)
        self._size -= 1
        self.pool.release([leaf.page])
