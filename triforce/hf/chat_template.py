"""Chat templates, which are Jinja programs of strangers: read from a checkpoint's folder, and run in a sandbox."""

import json
import re
from datetime import datetime
from functools import partial
from pathlib import Path

from ..errors import UserError
from .files import one_line, read_optional_json, read_text


def read_templates(folder: Path) -> dict[str, str]:
    """A folder's templates by name: of chat_template.jinja (`default`) and additional_chat_templates/NAME.jinja;
    without these, of tokenizer_config.json."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja", **{path.stem: path for path in more}}
    found = {name: read_text(path) for name, path in files.items() if path.exists()}
    if found:
        return found
    template = read_optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # of objects, each with its name
        template = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
    found = template if isinstance(template, dict) else {"default": template} if template else {}
    if not all(isinstance(text, str) for text in found.values()):
        raise UserError(f"{folder} has a chat_template that is no text; download it again")
    return found


def render(template: str, messages: list[dict], variables: dict) -> str:
    """The text of a conversation, up to where the model's answer begins. variables: what the template reads besides
    the messages; it has the functions that transformers gives to templates. Raises UserError if it rejects them."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise TemplateError(message)

    if "messages" in variables:
        raise UserError("chat_template_kwargs has 'messages', which are what is asked; drop them there")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    # {% generation %} marks what a training loss counts; for us, its content.
    template = re.sub(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})", lambda found: found[1] + (
        "endwith" if found[2] else "with") + found[3], template)
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        return sandbox.from_string(template).render({"messages": messages, "add_generation_prompt": True, **variables})
    except Exception as error:  # a program of others may divide by zero, or recurse
        raise UserError(f"the chat template rejects the messages: {one_line(error)}") from None
