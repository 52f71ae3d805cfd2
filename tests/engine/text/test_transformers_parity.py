"""The oracle of templates and prompts: Hugging Face transformers itself, on a template with everything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_text.chat_prompt import ChatPrompt
from pagefleet_text.chat_template import ChatTemplate

from tests.fakes.small_model import write_small_model

SOURCE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" and message.content is string %}
        {%- set ns.multi = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if (m.role == "user") or (m.role == "system" and not loop.first) %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
  {%- elif m.role == "assistant" %}
    {%- set c = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content %}
    {{- '<|im_start|>' + m.role + '\n' + c }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be <b>brief</b> & 'kind'"},
    {"role": "user", "content": "grüße 你好"},
    {
        "role": "assistant",
        "content": "<think>\nx</think>\n\nhi",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "ü<", "b": [1, None]}}}],
    },
    {"role": "user", "content": " bye <|im \n"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "does <x>", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("open_answer", [True, False])
def test_text_and_tokens_are_those_of_transformers(
    tmp_path: Path, tools: list[dict[str, Any]] | None, open_answer: bool
) -> None:
    from transformers import AutoTokenizer

    folder = write_small_model(tmp_path)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(SOURCE, tokenizer.special_tokens)
    options = {"tools": tools, "chat_template": SOURCE, "add_generation_prompt": open_answer}
    text = reference.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert template.render(MESSAGES, open_answer, {"tools": tools}) == text
    ids = reference.apply_chat_template(MESSAGES, return_dict=False, **options)
    assert ChatPrompt(tokenizer, template).token_ids(MESSAGES, open_answer, {"tools": tools}) == ids
