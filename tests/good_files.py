"""A bundle, a checkpoint and a GGUF file that are small and in order, to do harm to.

Knows: where they lie. Imports what makes them only when they are made: who harms them needs none.
"""

from pathlib import Path

NAMES = ("bundle", "checkpoint", "tiny.gguf")


def write_good_files(directory: Path) -> None:
    from quill.model.checkpoint.checkpoint import Checkpoint, save_checkpoint
    from quill.model.data.tokenizer import SpecialTokens, byte_tokenizer
    from tests.model.conftest import tiny_metadata, tiny_tensors, write_gguf
    from tests.server.tiny_bundle import make_talker

    bundle, checkpoint, gguf = (directory / name for name in NAMES)
    model = make_talker(bundle).model
    special = SpecialTokens(bos=0, eos=0)
    whole = Checkpoint(model.config, model.state_dict(), byte_tokenizer(), special)
    save_checkpoint(checkpoint, whole)
    write_gguf(gguf, tiny_metadata(), tiny_tensors(), {}, "llama")
