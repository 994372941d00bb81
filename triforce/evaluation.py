"""triforce in lm-evaluation-harness: `triforce eval --model_args pretrained=DIR,draft=DIR,budget=4096 --tasks ...`.

All flags but `--model` are the harness's own. Who calls it from Python imports this module, which registers the model
under the name "triforce". Requests with a long beginning in common share it.
"""

import sys
from collections import defaultdict

import torch

from .api import drawn_from
from .engine.buffers import SHARED_FROM
from .engine.loading import load
from .engine.prompt_cache import common_length
from .errors import UserError

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UserError(f"lm-evaluation-harness is not installed ({error}); pip install 'triforce[eval]'") from None

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")  # generation options of a task that are passed on
IGNORED = ("do_sample", "num_beams", "use_cache", "pad_token_id", "eos_token_id")


@register_model("triforce")
class TriforceLM(TemplateLM):
    """A checkpoint behind the harness's interface.

    Args:
        pretrained: a folder, a repository id or "tiny".
        max_length: positions of prompt and output; None: the model's.
        speculate: False answers without speculation, to compare with.
        options: those of `load`, such as draft, budget, dtype, offload.
    """

    max_gen_toks = 256  # of an answer, where a task does not say

    def __init__(self, pretrained: str = "tiny", batch_size: int | str = 1, max_batch_size: int | None = None,
                 device: str | None = None, max_length: int | None = None, speculate: bool = True, **options):
        super().__init__()
        if options.get("draft") in ("none", "None"):
            options["draft"] = False
        rows = int(batch_size) if str(batch_size).isdigit() else max_batch_size or 8
        self.engine = load(pretrained, device=device, max_batch_size=rows, max_seq_len=max_length, **options)
        self.tokens, self.speculate, self.batch_size = self.engine.tokenizer_or_raise(), speculate, rows
        self._device = self.engine.device

    @property
    def max_length(self) -> int:
        return self.engine.room(0)

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokens.eos_id if self.tokens.bos_id is None else self.tokens.bos_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokens.folder.resolve()).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """With what the tokenizer puts around a text, unless the text begins with its bos."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokens.token_of.get(self.tokens.bos_id) or "\0")
        return self.tokens.encode(string, bos=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the record of a run."""
        return self.tokens.chat_template() if chat_template else None

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        text = self.tokens.render(chat_history, variables={"add_generation_prompt": add_generation_prompt})
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()  # which the answer goes on with
        return text[: text.rindex(last) + len(last)]

    # -- scores --------------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """Of (texts, context ids, continuation ids): the continuation's log-likelihood, and whether it is greedy."""
        rows = []
        for number, (_, context, continuation) in enumerate(requests):
            ids = (context + continuation)[-(self.max_length + 1) :]
            rows.append((ids[:-1], ids[-len(continuation) :], number))
        rows.sort()  # what begins alike stands together
        found, prefix = {}, None
        for i, (ids, continuation, number) in enumerate(rows):
            count = len(continuation)
            if prefix is None or ids[: len(prefix.tokens)] != prefix.tokens or len(ids) - count < prefix.num_shared:
                prefix = self._shared_with_next(rows[i : i + 2])
            logs = self.engine.logits([ids], last=count, prefix=prefix)[0].log_softmax(-1)
            wanted = torch.tensor(continuation, device=logs.device)
            score = logs.gather(1, wanted[:, None]).sum().item()
            found[number] = score, bool((logs.argmax(-1) == wanted).all())
        return [found[number] for number in range(len(requests))]

    def _shared_with_next(self, rows: list):
        """What two rows begin with in common, before either one's continuation, computed; None if that is short."""
        contexts = [len(ids) - len(wanted) for ids, wanted, _ in rows]
        if len(rows) < 2 or (common := min(common_length(rows[0][0], rows[1][0]), *contexts)) < SHARED_FROM:
            return None
        prefix = self.engine.prefill(rows[0][0][:common])
        return prefix if prefix.num_shared else None

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        scores = []
        for request in requests:
            windows = map(make_disjoint_window, get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1))
            parts = self._loglikelihood_tokens([(None, *window) for window in windows])
            scores.append(sum(score for score, _ in parts))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, scores[-1])
        return scores

    # -- texts ---------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Requests of the same options in one call, those that begin alike side by side."""
        groups, found = defaultdict(list), {}
        for number, request in enumerate(requests):
            groups[repr(request.args[1])].append(number)
        for numbers in groups.values():
            options, stop, count = self._options(requests[numbers[0]].args[1])
            room = self.max_length - count
            if room < 1:
                raise UserError(f"max_gen_toks ({count}) fills {self.max_length} positions; lower it (--gen_kwargs)")
            prompts = {number: self.tok_encode(requests[number].args[0])[-room:] for number in numbers}
            numbers.sort(key=prompts.get)
            for first in range(0, len(numbers), self.batch_size):
                some = numbers[first : first + self.batch_size]
                results = self.engine.generate([prompts[number] for number in some], count, stop=stop or None,
                                               speculate=self.speculate, **options)
                for number, result in zip(some, results, strict=True):
                    found[number] = postprocess_generated_text(result.text, stop, None)
                    self.cache_hook.add_partial("generate_until", requests[number].args, found[number])
        return [found[number] for number in range(len(requests))]

    def _options(self, given: dict) -> tuple[dict, list[str], int]:
        """A task's generation options: those of sampling, what ends a text, and the most new tokens."""
        options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = [one for one in handle_stop_sequences(options.pop("until", None), eos=None) if one]
        count, sampling = options.pop("max_gen_toks"), {name: options.pop(name) for name in SAMPLING if name in options}
        sampling = (drawn_from(self.engine) if options.get("do_sample") else {"temperature": 0.0}) | sampling
        unknown = {name: value for name, value in options.items() if name not in IGNORED}
        if unknown or options.get("num_beams", 1) != 1:
            raise UserError(f"generation options {options} are not supported; known are until, max_gen_toks, "
                            f"do_sample, {', '.join(SAMPLING)}")
        return sampling, stop, count


def main(argv: list[str]) -> int:
    """`triforce eval`: the harness's own command, with this model."""
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm_eval", "run", "--model", "triforce", *argv]
    try:
        cli_evaluate()
    except ValueError as error:
        if not str(error).startswith(("No tasks", "Tasks not found")):
            raise
        raise UserError(f"{error} Name some: --tasks hellaswag") from None
    finally:
        sys.argv = before
    return 0
