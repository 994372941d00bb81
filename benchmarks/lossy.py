"""The target over its view alone, which is what lossy systems ship: tokens come out that the full cache never checked.

It is a composition of what a hierarchy has, and no mode of the library. A `Speculator` without drafters is plain
autoregression over the view that it is given; here it is given the view of the retrieval level and takes the place of
the full level. All else stays: the prompt is prefilled over the full cache, each step writes its keys and values into
the tail at their positions, a full tail is flushed into the prefix and into the view, and the view is chosen anew by
the newest queries. So a later token sees keys and values that were computed over the view.

Three kinds of view are three such systems (`config.VIEWS`): "retrieval", "streaming" (StreamingLLM) and "snapkv".
"""

from collections.abc import Callable

from triforce.config import Placement, Settings
from triforce.engine import Engine
from triforce.errors import UserError
from triforce.plan import Plan
from triforce.prefix import Prefix
from triforce.speculator import Speculator
from triforce.state import State
from triforce.tape import FULL
from triforce.tree import TokenTree

# Nothing is drafted. That a view takes part is said all the same: then it is chosen anew when that is due.
VIEW_ALONE = Plan(retrieval=True, padded=False)


class ViewEngine(Engine):
    """An engine whose answers are those of the target over its view alone, whatever `speculate` says.

    Noise is keyed as at the full level: where the view gives the full cache's law, a seed gives the same token.

    Args:
        base: has the weights.
        kind: of the view, one of `config.VIEWS`. budget: its tokens.

    Raises:
        UserError: the cache is offloaded, or the budget does not fit the chunks.
    """

    def __init__(self, base: Engine, kind: str, budget: int, **settings):
        if base.placement.offload:
            raise UserError("a view of an offloaded cache is gathered while a verify streams past, and here is none; "
                            "leave out offload")
        given = base.settings
        chosen = {"chunk_size": given.chunk_size, "flush_interval": given.flush_interval, "recent": given.recent,
                  "block_size": given.block_size, "rebuild_interval": given.rebuild_interval, **settings}
        super().__init__(base.target, base.tokenizer, eos_ids=base.eos_ids,
                         settings=Settings(draft=False, draft_cache=kind, budget=budget, gamma=1, **chosen),
                         placement=Placement(device=base.device, max_seq_len=base.placement.max_seq_len,
                                             compile=base.placement.compile))

    def prepare(self, ids: list[list[int]], max_new_tokens: int, on_prefill: Callable[[float], None] | None = None,
                plan: Plan | None = None, prefix: Prefix | None = None, **sampling) -> State:
        state = super().prepare(ids, max_new_tokens, on_prefill, VIEW_ALONE, prefix, **sampling)
        attend_to_view(state)
        return state


def attend_to_view(state: State) -> None:
    """From now on the State's rounds emit what the target says over the view. It is prefilled, and has a view."""
    hierarchy, full = state.hierarchy, state.hierarchy.outer
    if full.view is hierarchy.view:
        return
    level = Speculator(state.target, state.cache, hierarchy.view, state.tape, level=FULL, tree=TokenTree(1),
                       drafters={}, keep_queries=True, keep_logits=state.settings.keep_logits, compiler=state.compiler)
    level.length.copy_(full.length)
    level.limit.copy_(full.limit)
    hierarchy.outer = level


def lend(holder: Engine, ids: list[int], engine: Engine, last: int) -> Prefix:
    """Keys and values of a prompt that an engine has just answered, for another one: they are not computed again.

    Args:
        holder: answered it, by itself and without a prefix. engine: over the same weights.
        last: tokens at the prompt's end that are left out, and perhaps a few more: whole flush intervals are lent.

    Raises:
        UserError: the engines differ in the weights, or in what a store depends on.
    """
    mine, theirs = holder.settings, engine.settings
    for name in ("flush_interval", "chunk_size"):
        if getattr(mine, name) != getattr(theirs, name):
            raise UserError(f"{name} is {getattr(mine, name)} where the prompt was computed and "
                            f"{getattr(theirs, name)} where it is to be read; give both engines the same")
    if holder.target is not engine.target:
        raise UserError("the prompt was computed by another model; let an engine over the same weights answer it first")
    length = max(len(ids) - last, 0) // mine.flush_interval * mine.flush_interval
    store = holder.buffers.state.cache.prefix
    return Prefix(engine, ids[:length], store.part(length) if length else None)
