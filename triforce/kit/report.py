"""The records of a check as a page of Markdown."""

from .tables import gib, items, paragraph, table

LOOPS = 0.3  # of a text that says the same again


def page(told: dict) -> str:
    """told: `passed`, `failed`, `seconds` and the records."""
    records = told["records"]
    by_name = {record["name"]: record for record in records}
    checked = [record for record in records if record["passed"] is not None]
    parts = [f"# triforce check: {by_name['checkpoint']['folder']}", _verdict(told, checked)]
    failed = [f"**{record['name']}**: {record['advice']}" for record in checked if not record["passed"]]
    if failed:
        parts += ["## What failed", items(failed)]
    parts += ["## Machine and checkpoint", items(_about(by_name))]
    for title, make in (("Logits beside transformers", _logits), ("Greedy bits, speculation on and off", _greedy),
                        ("Acceptance", page_of_acceptance), ("Steps", _steps), ("Time per token", _times)):
        made = make(records)
        if made:
            parts += [f"## {title}", made]
    if "memory" in by_name:
        parts += ["## Memory", _memory(by_name["memory"])]
    skipped = [f"{record['name']}: {record['skipped']}" for record in records if "skipped" in record]
    if skipped:
        parts += ["## Not checked", items(skipped)]
    if by_name.get("advice", {}).get("lines"):
        parts += ["## Advice", items(by_name["advice"]["lines"])]
    return "\n\n".join(parts) + "\n"


def _verdict(told: dict, checked: list[dict]) -> str:
    took = f" It took {told['seconds']:.0f} s."
    if told["passed"]:
        return paragraph(f"**All {len(checked)} checks passed.**{took}")
    return paragraph(f"**{len(told['failed'])} of {len(checked)} checks failed: {', '.join(told['failed'])}.**{took}")


def _about(by_name: dict[str, dict]) -> list[str]:
    machine, text, load = by_name["machine"], by_name["text"], by_name["load"]
    where = machine.get("gpu", "CPU")
    total = f" of {gib(machine['gpu_memory'])}" if "gpu_memory" in machine else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [f"{where} ({machine['device']}), {gib(machine['free_memory'])}{total} GiB free, {machine['cores']} cores, "
             f"{machine['threads']} threads; {machine['system']}; {machine['date']}",
             versions + (f", CUDA {machine['cuda']}" if machine.get("cuda") else "")]
    for name in ("checkpoint", "draft"):
        if name in by_name:
            lines.append(_model(name, by_name[name]))
    repeated = f", begun anew {text['repeated']} times: n-grams and views have it easier" if text["repeated"] else ""
    lines.append(f"text: {text['file'] or 'the language reference of CPython'}{repeated}")
    lines.append(f"loaded in {load['seconds']:.1f} s" + ("" if load["compiled_before"] or "gpu" not in machine else
                 "; no compiled steps were there, so run this twice for the times of later runs"))
    return lines


def _model(name: str, about: dict) -> str:
    rope = about["rope"] if about["rope"] == "default" else f"{about['rope']} x{about['rope_factor']:g}"
    shape = (f"{about['layers']} layers of {about['dim']}, {about['heads']} heads over {about['kv_heads']} of K/V, "
             f"{about['vocabulary']:,} words, {about['window']:,} positions")
    return (f"{name}: {about['architecture']}, {about['parameters'] / 1e6:,.1f}M parameters, {shape}, rope {rope} of "
            f"theta {about['rope_theta']:g}, {about['dtype']}, {gib(about['file_bytes'])} GiB in {about['files']} "
            f"file{'s' * (about['files'] != 1)}")


def _logits(records: list[dict]) -> str:
    rows = [[record["name"].removeprefix("logits, "), f"{record['tokens']:,}", f"{record['max_difference']:.1e}",
             f"{record['max_allowed']:.1e}", f"{record['mean_difference']:.1e}", f"{record['mean_allowed']:.1e}",
             f"{100 * record['same_top']:.1f}%", _word(record)]
            for record in records if "max_difference" in record]
    return table(["text", "tokens", "max", "allowed", "mean", "allowed", "same top", ""], rows) if rows else ""


def _greedy(records: list[dict]) -> str:
    rows = [[record["name"].removeprefix("greedy, "), str(record["tokens"]), str(record["drafted"]),
             str(record["kept"]), "identical" if record["passed"] else
             f"DIFFERENT from token {record['first_difference']}"]
            for record in records if record["name"].startswith("greedy, ")]
    return table(["way to draft", "tokens", "drafted", "kept", ""], rows) if rows else ""


def page_of_acceptance(records: list[dict]) -> str:
    tried = [record for record in records if "drafted" in record and "kept" in record
             and isinstance(record["drafted"], list)]
    if not tried:
        return ""
    most = max(len(record["drafted"]) for record in tried)
    rows = []
    for record in tried:
        shares = [_share(kept, drafted) for kept, drafted in zip(record["kept"], record["drafted"], strict=True)]
        rows.append([record["way"], f"{record['temperature']:g}", _rate(record["acceptance"].get("full")),
                     *shares, *[""] * (most - len(shares))])
    text = table(["way to draft", "T", "full", *map(str, range(1, most + 1))], rows)
    lines = [f"{record['way']}, T {record['temperature']:g}: of the draft model's tokens the view kept "
             f"{_rate(record['acceptance']['retrieval'])}" for record in tried if "retrieval" in record["acceptance"]]
    budget, length = tried[0]["budget"], tried[0]["prompt_len"]
    if budget >= length:
        lines.append(f"a view holds the whole prompt of {length:,} tokens, so rates of views say little; give "
                     f"--lengths above {4 * budget:,}")
    loops = [f"{record['way']}, T {record['temperature']:g}, {100 * record['repeats']:.0f}%" for record in tried
             if record["repeats"] > LOOPS]
    if loops:
        lines.append(f"these texts repeat themselves, which is easily drafted: {'; '.join(loops)} of their runs of "
                     "four tokens stood before. Another text or a higher --temperature says more.")
    about = paragraph("full: of all drafted tokens, the share that the full cache kept. 1 and on: the same at each "
                      "position of a round. A token behind a rejected one counts as not kept.")
    return "\n\n".join([text, about, *([items(lines)] if lines else [])])


def _steps(records: list[dict]) -> str:
    rows = [[record["name"].removeprefix("step, "), f"{record['milliseconds']:.2f}", gib(record["bytes"]),
             f"{record['bytes_a_second'] / 1e9:.1f}", f"{100 * record['of_copy_bandwidth']:.0f}%"]
            for record in records if record["name"].startswith("step, ")]
    machine = next(record for record in records if record["name"] == "machine")
    about = paragraph(f"A plain copy on this device reads and writes {machine['copy_bandwidth'] / 1e9:.1f} GB/s.")
    return table(["step", "ms", "GiB read", "GB/s", "of a copy"], rows) + "\n\n" + about if rows else ""


def _times(records: list[dict]) -> str:
    on = {record["prompt_len"]: record for record in records if record["name"].startswith("on, ")}
    off = {record["prompt_len"]: record for record in records if record["name"].startswith("off, ")}
    runs = {record["name"]: record for record in records if record["name"].startswith("run, ")}
    if not on:
        return ""
    rows = []
    for length in sorted(on):
        fast, slow = on[length]["milliseconds_a_token"], off[length]["milliseconds_a_token"]
        prefill = max(on[length]["prefill"], off[length]["prefill"], *(
            [runs["run, first"]["prefill"]] if length == runs["run, first"]["prompt_len"] else []))
        rows.append([f"{length:,}", f"{prefill:.2f}", f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.2f}x",
                     f"{on[length]['tokens_a_verify']:.2f}"])
    first, second = runs["run, first"], runs["run, second"]
    about = paragraph(f"ms a token, without the prefill. The first run took "
                      f"{first['milliseconds_a_token']:.2f} ms a token and {first['preparing']:.1f} s of preparing "
                      f"steps, the second {second['milliseconds_a_token']:.2f} and {second['preparing']:.1f}.")
    return table(["prompt", "prefill, s", "off", "on", "speed-up", "tokens a verify"], rows) + "\n\n" + about


def _memory(record: dict) -> str:
    rows = [[name, gib(size)] for name, size in record["parts"].items()]
    rows += [["planned, all", gib(record["planned"])], ["caches, planned", gib(record["caches_planned"])],
             ["caches, held", gib(record["caches_held"])], ["peak of the process", gib(record["peak"])]]
    return table([f"at {record['prompt_len']:,} tokens", "GiB"], rows)


def _word(record: dict) -> str:
    return "ok" if record["passed"] else "FAILED"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f}".removeprefix("0")


def _share(kept: int, drafted: int) -> str:
    return _rate(kept / drafted if drafted else None)
