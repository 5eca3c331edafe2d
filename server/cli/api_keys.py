"""`quill keys add`, `quill keys list`, `quill keys revoke`.

Knows: terminals, the file of keys. Does not know: servers: those notice a change by themselves.
"""

import argparse
import sys

from quill.server.auth.key_file import add_key, read_keys, revoke_key


def add(args: argparse.Namespace) -> None:
    """The key alone goes to stdout, so that it can go into a file and be seen by nobody."""
    secret = add_key(
        args.file,
        args.name,
        requests_per_minute=args.requests_per_minute,
        max_concurrent=args.max_concurrent,
        tokens_per_minute=args.tokens_per_minute,
        max_prompt_tokens=args.max_prompt_tokens,
        admin=args.admin,
    )
    print(secret)
    print(
        "This is the only time that the key is shown. Give it to the client as a file for "
        "--api-key-file, or in $QUILL_API_KEY.",
        file=sys.stderr,
    )


def show(args: argparse.Namespace) -> None:
    for key in read_keys(args.file):
        state = f"revoked {key.revoked}" if key.revoked else f"created {key.created}"
        rate = "any rate" if key.requests_per_minute is None else f"{key.requests_per_minute}/min"
        most = "any number" if key.max_concurrent is None else f"{key.max_concurrent}"
        limits = [rate, f"{most} at once"]
        if key.tokens_per_minute is not None:
            limits.append(f"{key.tokens_per_minute} tokens/min")
        if key.max_prompt_tokens is not None:
            limits.append(f"prompts up to {key.max_prompt_tokens} tokens")
        print(f"{key.name}: {state}, {', '.join(limits)}{', admin' if key.admin else ''}")


def revoke(args: argparse.Namespace) -> None:
    revoke_key(args.file, args.name)
    print(f"{args.name} is revoked. Servers refuse its next call; calls that run go on.")
