"""How many sequences run at once, how long they are, and how many blocks they share.

Knows: numbers. Does not know: steps, memory.
"""

from dataclasses import dataclass

from quill.server.request import Request


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_num_seqs: int
    context: int  # tokens of prompt and answer together
    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    speculative: bool = True
    max_prefill_tokens: int = 1024  # of prompts and sources, in a step
    whole_prompts: bool = False  # each prompt in one chunk, as encoders need
    one_token_steps: bool = (
        False  # one token of each sequence; then there is no speculation, either
    )

    def num_blocks_of(self, request: Request, num_tokens: int) -> int:
        """For a request's sequences after so many tokens each: they share the prompt's blocks."""
        num_prompt, size = request.num_before, self.block_size
        num_shared = num_prompt // size
        num_own = -(-(num_prompt + num_tokens) // size) - num_shared
        return num_shared + request.num_seqs * num_own + self.num_source_blocks(request)

    def num_source_blocks(self, request: Request) -> int:
        return -(-len(request.source_ids or ()) // self.block_size)

    def fits(self, request: Request) -> bool:
        """Whether there are sequences and blocks enough for the request alone."""
        max_tokens = min(request.max_new_tokens, self.context - request.num_before)
        fits_blocks = self.num_blocks_of(request, max(0, max_tokens)) <= self.num_blocks
        return request.num_seqs <= self.max_num_seqs and fits_blocks


def encoder_limits(*, max_num_seqs: int, context: int, max_prefill_tokens: int = 1024) -> Limits:
    """An encoder has no KV cache: a block is a place in a step, for one text."""
    return Limits(
        max_num_seqs=max_num_seqs,
        context=context,
        num_blocks=max_prefill_tokens,
        block_size=context,
        prefix_caching=False,
        speculative=False,
        max_prefill_tokens=max_prefill_tokens,
        whole_prompts=True,
    )
