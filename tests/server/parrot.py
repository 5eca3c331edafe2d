"""A session with no model that says what it is asked to say, and templates that know tools.

Its blocks hold token ids. What the last message has after "say " is what it would say; a form may
keep it from that. After these words it ends.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quill.server.engine.model_runner import BlockCopy, Chunk, ModelOutput
from quill.server.frontend.served_model import ServedModel
from quill.server.text.chat_template import ChatTemplate
from tests.server.running import make_served
from tests.server.scripted_session import D_MODEL, END, VOCAB_SIZE, Reciter, token_of

BLOCK = 16
CONTEXT = 3000
SPEAKS = ">assistant:"
# Small ones of our own, in the way of those that models have.
HERMES = """
{%- if tools %}>tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}
{%- for m in messages %}
>{{ m.role }}:{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endfor %}
>assistant:"""
LLAMA3 = (
    HERMES.replace("<tool_call>\n", "")
    .replace("\n</tool_call>", "")
    .replace('"arguments"', '"parameters"')
)
MISTRAL = """
{%- if tools %}>tools:{{ tools | tojson }}
{% endif %}
{%- for m in messages %}
>{{ m.role }}:{{ m.content }}
{%- if m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- call.function | tojson }}{{ ", " if not loop.last }}
{%- endfor %}]
{%- endif %}
{%- endfor %}
>assistant:"""


class Parrot(Reciter):
    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, list[int]] = defaultdict(lambda: [END] * BLOCK)

    def step(self, chunks: Sequence[Chunk]) -> ModelOutput:
        self._step()
        for chunk in chunks:
            for position, token in enumerate(chunk.ids, start=chunk.start):
                self._blocks[chunk.blocks[position // BLOCK]][position % BLOCK] = token
        texts = [
            self._text(chunk, chunk.start + i + 1) for chunk in chunks for i in chunk.logits_at
        ]
        logits_LV = np.zeros((len(texts), VOCAB_SIZE), np.float32)
        for row, text in enumerate(texts):
            logits_LV[row, _next(text)] = 20.0
        return ModelOutput(logits_LV, np.zeros((0, D_MODEL), np.float32))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for each in copies:
            self._blocks[each.target] = list(self._blocks[each.source])

    def _text(self, chunk: Chunk, length: int) -> bytes:
        tokens = [self._blocks[chunk.blocks[at // BLOCK]][at % BLOCK] for at in range(length)]
        return bytes(max(token - 1, 0) for token in tokens)


def _next(text: bytes) -> int:
    before, _, said = text.rpartition(SPEAKS.encode())
    words = before.rpartition(b"say ")[2]
    return token_of(words[len(said)]) if len(said) < len(words) else END


def make_parrot(template: str = HERMES, **changes: Any) -> ServedModel:
    served = make_served(max_num_seqs=8, template=ChatTemplate(template, {}), **changes)
    return replace(served, limits=replace(served.limits, context=CONTEXT, num_blocks=2000))
