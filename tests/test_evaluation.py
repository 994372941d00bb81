"""lm-evaluation-harness: `triforce eval` beside the harness's own model of the same folder, on tasks of local files."""

import json

import pytest
import torch
from families import build, config_json, save

import triforce
from triforce.cli import main
from triforce.hf.folders import TINY

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from triforce.evaluation import TriforceLM  # noqa: E402

TASKS = {
    "choice": ("multiple_choice", 'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\n'
               "metric_list:\n  - metric: acc\n"),
    "perplexity": ("loglikelihood_rolling", 'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
                   "metric_list:\n  - metric: word_perplexity\n"),
    "answer": ("generate_until", 'doc_to_text: "{{text}}"\ndoc_to_target: "{{choices[0]}}"\n'
               'generation_kwargs:\n  until: ["\\n\\n", "zzz"]\n  max_gen_toks: 24\n'
               "metric_list:\n  - metric: exact_match\n")}
# What long requests begin with: they share it.
DOCUMENT = "".join(f"Item {n}: the {word} is number {n * n % 97}.\n" for n, word in enumerate(
    ["apple", "river", "stone", "cloud", "paper"] * 30))
TEXTS = ["The quick brown fox", "def add(a, b):\n    return", "One, two, three,", "In the beginning", "A",
         DOCUMENT + "The apple is", DOCUMENT + "The river is number", DOCUMENT + "A cloud"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with three tasks over one local file of documents."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": text, "choices": [" jumps over", " 4", " the end of it all"], "label": i % 3}
            for i, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, more) in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\n"
            f"output_type: {kind}\ntest_split: test\n{more}")
    return folder


def evaluate(model, tasks, **more):
    """By task, what the model answered to each request, in the order of the documents."""
    manager = TaskManager(include_path=str(tasks))
    found = lm_eval.simple_evaluate(model, tasks=[f"local_{name}" for name in TASKS], task_manager=manager,
                                    bootstrap_iters=0, log_samples=True, **more)
    return {name: [sample["resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]
            for name, samples in found["samples"].items()}


def numbers(resps) -> list[float]:
    """All log-likelihoods, nested however."""
    return [x for one in resps for x in (numbers(one) if isinstance(one, (list, tuple)) else [one])
            if isinstance(x, float)]


def test_equals_the_harness_own_model(tasks, watched):
    """Log-likelihoods to 1e-3, greedy answers to the letter, with speculation and without; long requests that begin
    alike share it."""
    theirs = evaluate(HFLM(pretrained=str(TINY / "target"), device="cpu", dtype="float32", batch_size=1), tasks)
    held = watched(triforce.Engine, "logits", lambda engine, ids, last=None, prefix=None:
                   0 if prefix is None else prefix.num_shared)
    for speculate in (True, False):
        model = TriforceLM("tiny", device="cpu", dtype="float32", batch_size="3", speculate=speculate)
        ours = evaluate(model, tasks)
        assert ours.keys() == theirs.keys() and ours["local_answer"] == theirs["local_answer"]
        for name in ("local_choice", "local_perplexity"):
            mine, other = numbers(ours[name]), numbers(theirs[name])
            assert len(mine) == len(other) >= len(TEXTS) and min(other) < -1
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=0, atol=1e-3)
    assert any(len(one[0][0]) > 8 for one in ours["local_answer"]) and max(held) > 512 and held.count(0) > len(TEXTS)


def test_the_command(tasks, tmp_path, capsys):
    """All flags but the model are the harness's."""
    assert main(["eval", "--model_args", "pretrained=tiny,draft=none,budget=1024,dtype=float32", "--device", "cpu",
                 "--tasks", "local_choice", "--include_path", str(tasks), "--output_path", str(tmp_path / "out")]) == 0
    assert "local_choice" in capsys.readouterr().out and list((tmp_path / "out").rglob("results*.json"))


def test_a_chat_template(tmp_path):
    """With what the harness puts before an answer that it begins itself, and without."""
    from tokenizer_folders import make_folders
    from transformers import AutoTokenizer

    source = make_folders(tmp_path)["Qwen3"]
    vocab = len(AutoTokenizer.from_pretrained(source))
    folder = save(build("Qwen3", vocab_size=vocab), {**config_json("Qwen3"), "vocab_size": vocab}, tmp_path / "model")
    for path in source.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    ours, theirs = TriforceLM(str(folder), device="cpu", draft="none"), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert ours.apply_chat_template(asked) == theirs.apply_chat_template(asked, tokenize=False,
                                                                         add_generation_prompt=True)
    begun = [*asked, {"role": "assistant", "content": "Because of"}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == theirs.apply_chat_template(
        begun, tokenize=False, continue_final_message=True)
    assert ours.chat_template(True) == theirs.chat_template


@pytest.mark.parametrize("flags,text", [([], "No tasks specified"), (["--tasks", "no_such_task"], "no_such_task")])
def test_tasks_that_are_not_there_end_in_a_line(capsys, flags, text):
    assert main(["eval", "--model_args", "pretrained=tiny", *flags]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and text in last and "--tasks" in last
