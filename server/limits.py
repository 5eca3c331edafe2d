"""How many can be served at once, and how long.

Knows: numbers. Does not know: who is served.
"""

from dataclasses import dataclass

from quill.server.request import Request


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_num_seqs: int
    context: int  # tokens of prompt and answer together
    num_blocks: int
    block_size: int = 16
    share: bool = True  # blocks of texts that begin alike
    speculative: bool = True
    max_read: int = 1024  # tokens of prompts and sources in a step
    reads_whole: bool = False  # each text at once, as encoders do
    one_token_steps: bool = False  # of each sequence; then nothing is guessed, either

    def num_blocks_of(self, request: Request, num_tokens: int) -> int:
        """What its rows hold together after so many tokens each: they share the prompt only."""
        num_prompt, size = request.num_before, self.block_size
        num_shared = num_prompt // size
        num_own = -(-(num_prompt + num_tokens) // size) - num_shared
        return num_shared + request.num_rows * num_own + self.num_source_blocks(request)

    def num_source_blocks(self, request: Request) -> int:
        return -(-len(request.source_ids or ()) // self.block_size)

    def fits(self, request: Request) -> bool:
        """Whether there are rows and blocks enough for it, if it is alone."""
        max_tokens = min(request.max_new_tokens, self.context - request.num_before)
        fits_blocks = self.num_blocks_of(request, max(0, max_tokens)) <= self.num_blocks
        return request.num_rows <= self.max_num_seqs and fits_blocks


def encoder_limits(*, max_num_seqs: int, context: int, max_read: int = 1024) -> Limits:
    """An encoder keeps nothing: a block is a place in a step, and holds one text."""
    return Limits(
        max_num_seqs=max_num_seqs,
        context=context,
        num_blocks=max_read,
        block_size=context,
        share=False,
        speculative=False,
        max_read=max_read,
        reads_whole=True,
    )
