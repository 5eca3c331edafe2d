"""`quill batch`, through the front door, and rows of pipelines."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quill.__main__ import main
from quill.client import answer_lines
from quill.server.auth.key_file import add_key
from quill.server.client.tools.batch import AHEAD, in_order
from quill.server.client.tools.batch_lines import derived_seed
from tests.server.process import COMMAND_LINE, wait_until
from tests.server.running import Running, make_embedder, make_manifest, make_served, running_server

Run = Callable[..., tuple[int, str]]
NUM_LINES = 60
DRAWN: dict[str, Any] = {
    "temperature": 5.0,
    "constraint": {"regex": "[a-y]+"},
}  # the reciter knows these letters


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(served=make_embedder()) as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def run(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], running: Running) -> Run:
    """Exit code, and what was said."""

    def call(*options: str, address: str = running.address) -> tuple[int, str]:
        code = main(["batch", *map(str, files), "--address", address, *options])
        return code, capsys.readouterr().err

    return call


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n"
                            for each in lines))  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(num: int = NUM_LINES, **options: object) -> list[dict[str, object]]:
    """Of lengths such that some take much longer than others."""
    return [
        {"prompt": f"{number}a", "max_new_tokens": 2 + 37 * number % 50, **options}
        for number in range(num)
    ]


def started(files: tuple[Path, Path], address: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", COMMAND_LINE, "batch", *map(str, files), "--address", address]
    return subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)


def test_prompts_conversations_and_vectors_are_answered_in_order(
    run: Run, files: tuple[Path, Path]
) -> None:
    write(
        files[0],
        {"prompt": "abc", "max_new_tokens": 3, "id": "first"},
        {"messages": [{"role": "user", "content": "x"}], "max_new_tokens": 2, "id": [1, None]},
        "  \n",
        {"prompt": [98], "max_new_tokens": 2, "num_sequences": 2, "seed": 5},
        {"prompt": "Z"},
        {"input": ["a", [98]], "dimensions": 2},
    )
    code, said = run()
    assert code == 0
    assert "5/5 lines" in said
    first, second, third, empty, vectors = read(files[1])
    assert [first["line"], second["line"], third["line"]] == [1, 2, 4]
    assert (first["id"], second["id"], "id" in third) == ("first", [1, None], False)
    assert first["answer"]["sequences"][0]["text"] == "def"
    assert first["answer"]["usage"] == {"prompt_tokens": 3, "generated_tokens": 3}
    assert second["answer"]["sequences"][0]["text"] == "lm"
    assert [each["text"] for each in third["answer"]["sequences"]] == ["bc", "bc"]
    assert third["answer"]["seed"] == "5"
    assert empty["answer"]["sequences"][0]["text"] == ""
    assert [len(each["values"]) for each in vectors["answer"]["embeddings"]] == [2, 2]


def test_the_same_file_has_the_same_answers(run: Run, files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(**DRAWN))
    written = []
    for options in (("--concurrency", "1"), ("--concurrency", "50"), ("--seed", "1")):
        assert run(*options)[0] == 0
        written.append(files[1].read_bytes())
        files[1].unlink()
    assert written[0] == written[1]
    drawn = [[line.split(b'"token_ids"')[1] for line in each.splitlines()] for each in written]
    assert len(set(drawn[0])) == NUM_LINES
    assert not set(drawn[0]) & set(drawn[2])


def test_bad_lines_stop_no_others(run: Run, files: tuple[Path, Path]) -> None:
    write(
        files[0],
        {"prompt": "abc", "max_new_tokens": 2},
        "{\n",
        {"prompt": "abc", "temperature": -1, "id": "cold"},
        {"prompt": "abc" * 1000},
        {"prompt": "def", "max_new_tokens": 2},
    )
    code, said = run()
    assert code == 4
    assert said.endswith(f'quill: 3 of 5 lines failed: see their "error" in {files[1]}\n')
    good, *bad, last = read(files[1])
    assert good["answer"]["sequences"][0]["text"] == "de"
    assert last["answer"]["sequences"][0]["text"] == "gh"
    assert [each["error"]["code"] for each in bad] == ["INVALID_ARGUMENT"] * 3
    assert [each["error"]["field"] for each in bad] == ["line", "temperature", "prompt"]
    assert (bad[1]["id"], bad[1]["line"]) == ("cold", 3)
    again, said = run()  # there is nothing left to do, and it is no better
    assert again == 4
    assert "5 lines are answered already" in said


def test_it_goes_on_wherever_it_was_cut(run: Run, files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(8), "{\n")
    assert run()[0] == 4
    whole = files[1].read_bytes()
    for end in range(0, len(whole), len(whole) // 15):
        files[1].write_bytes(whole[:end])
        assert run()[0] == 4
        assert files[1].read_bytes() == whole


def test_answers_to_something_else_are_left_alone(
    run: Run, running: Running, files: tuple[Path, Path]
) -> None:
    write(files[0], *prompts(3))
    assert run()[0] == 0
    before = files[1].read_bytes()
    assert run("--seed", "1")[0] == 1
    write(files[0], {"prompt": "another"}, *prompts(3))
    code, said = run()
    assert code == 1
    assert "line 1 of" in said
    other = make_served(manifest=make_manifest(name="another"))
    with running_server(served=other) as server:
        write(files[0], *prompts(3))
        assert run(address=server.address)[0] == 1
        code, said = run(address=f"quill://{running.address},{server.address}")
        assert code == 1
        assert "the servers serve different models" in said
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_in_the_middle_it_loses_no_line(
    number: signal.Signals, running: Running, run: Run, files: tuple[Path, Path]
) -> None:
    write(files[0], *prompts(**DRAWN))
    running.session.hold()
    process = started(files, running.address, "--concurrency", "4")
    try:
        running.session.let_go(300)
        wait_until(lambda: files[1].exists() and files[1].stat().st_size > 0, "lines are answered")
        process.send_signal(number)
        _, said = process.communicate()
    finally:
        process.kill()
        running.session.let_go()
    assert (
        process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    )
    lines = files[1].read_text().splitlines()
    assert 0 < len(lines) < NUM_LINES
    if number != signal.SIGKILL:
        assert f"{len(lines)} lines are answered: the same command resumes" in said
    assert run()[0] == 0
    resumed = files[1].read_bytes()
    files[1].unlink()
    assert run()[0] == 0
    assert files[1].read_bytes() == resumed
    assert resumed.count(b"\n") == NUM_LINES


def test_a_full_server_is_waited_for(files: tuple[Path, Path], run: Run) -> None:
    write(files[0], *prompts(20))
    with running_server(max_num_seqs=1, max_waiting=1) as server:
        assert run("--concurrency", "10", address=server.address)[0] == 0
        assert server.next_record("RESOURCE_EXHAUSTED")
    assert all("answer" in each for each in read(files[1]))


def test_servers_that_never_come_are_an_error_in_words(run: Run, files: tuple[Path, Path]) -> None:
    write(files[0], *prompts())
    code, said = run(address="127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1" in said
    with running_server() as server:
        server.session.hold()
        soon = ("--unavailable-timeout", "0.5", "--concurrency", "2")
        process = started(files, server.address, *soon)
        server.wait_for_requests(2)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "no server has answered for 0.5 s" in said
    assert re.search(r"\d lines are answered: the same command resumes", said)


def test_an_answer_that_the_clock_cuts_is_an_error(files: tuple[Path, Path], run: Run) -> None:
    write(files[0], {"prompt": "abc", "max_new_tokens": 9})
    with running_server() as server:
        server.session.hold()
        server.session.let_go(3)
        assert run("--timeout", "1", address=server.address)[0] == 4
    (line,) = read(files[1])
    assert line["error"]["code"] == "DEADLINE_EXCEEDED"


def test_files_that_cannot_be_used_are_errors_in_words(
    run: Run, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run()
    assert code == 1
    assert "can't read" in said
    write(files[0], *prompts(1))
    assert main(["batch", "/dev/null", str(files[1])]) == 1
    assert "must be a file" in capsys.readouterr().err
    os.link(*files)
    code, said = run()
    assert code == 1
    assert "is the input file" in said


def test_rows_of_a_pipeline_are_answered(running: Running) -> None:
    rows = [json.dumps(each) for each in prompts(5, **DRAWN)]
    answers = answer_lines([*rows, "{", rows[0]], running.address)
    first, *_, bad, again = map(json.loads, answers)
    assert set(first) == {"answer"}
    assert bad["error"]["code"] == "INVALID_ARGUMENT"
    assert again == first
    assert answer_lines(rows[::-1], running.address)[::-1] == answers[:5]
    assert answer_lines(rows[:1], running.address, seed=1) != answers[:1]


def test_a_step_that_fails_is_asked_for_again(run: Run, files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(2))
    with running_server() as server:
        server.session.failures += [RuntimeError("a bug")] * 2
        assert run(address=server.address)[0] == 0
        server.session.failures += [RuntimeError("a bug")] * 20
        files[1].unlink()
        assert run(address=server.address)[0] == 4
    assert [each["error"]["code"] for each in read(files[1])] == ["INTERNAL"] * 2


def posted(number: int, url: str = "/v1/completions", **body: object) -> dict[str, object]:
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def test_files_of_openais_are_answered_in_their_form(run: Run, files: tuple[Path, Path]) -> None:
    said = [{"role": "user", "content": "x"}]
    write(
        files[0],
        posted(1, prompt="abc", max_tokens=3),
        posted(2, "/v1/chat/completions", messages=said, max_tokens=2),
        posted(3, "/v1/embeddings", input=["a", "b"], dimensions=2),
        posted(4, prompt="abc", temperature=-1),
        posted(5, "/v1/files"),
        posted(6, prompt="abc", stream=True),
        {"prompt": "abc", "max_new_tokens": 1},
    )
    with running_server(http_port=0, served=make_embedder()) as server:
        http = ("--http", f"127.0.0.1:{server.http_port}")
        assert run(*http, address=server.address)[0] == 4
        first, second, third, cold, unknown, stream, own = read(files[1])
        assert first["custom_id"] == "line-1"
        assert first["error"] is None
        assert first["response"]["status_code"] == 200
        body = first["response"]["body"]
        assert body["choices"][0]["text"] == "def"
        assert (body["object"], body["created"], body["usage"]["completion_tokens"]) == (
            *("text_completion", 0, 3),
        )
        assert body["seed"] == derived_seed(0, 1)
        assert second["response"]["body"]["choices"][0]["message"]["content"] == "lm"
        assert len(third["response"]["body"]["data"]) == 2
        assert (cold["custom_id"], cold["response"]["status_code"], cold["error"]) == (
            *("line-4", 400, None),
        )
        assert "temperature" in cold["response"]["body"]["error"]["message"]
        assert unknown["error"]["field"] == "url"
        assert stream["error"]["field"] == "body.stream"
        assert own["answer"]["sequences"][0]["text"] == "d"
        whole = files[1].read_bytes()
        for end in (0, len(whole) // 2):
            files[1].write_bytes(whole[:end])
            assert run(*http, address=server.address)[0] == 4
            assert files[1].read_bytes() == whole


def test_openais_lines_wait_for_full_servers_and_know_keys(
    run: Run, files: tuple[Path, Path], tmp_path: Path
) -> None:
    write(files[0], *(posted(number, prompt="abc", max_tokens=9) for number in range(20)))
    keys, key = tmp_path / "keys.json", tmp_path / "key"
    key.write_text(add_key(keys, "me"))
    with running_server(max_num_seqs=1, max_waiting=1, http_port=0, api_keys=keys) as server:
        http = ("--http", f"127.0.0.1:{server.http_port}", "--api-key-file", str(key))
        assert run("--concurrency", "5", *http, address=server.address)[0] == 0
        assert server.next_record("RESOURCE_EXHAUSTED")
    assert [each["response"]["status_code"] for each in read(files[1])] == [200] * 20


def test_openais_lines_end_at_once_with_ctrl_c(files: tuple[Path, Path]) -> None:
    write(files[0], *(posted(number, prompt="abc", max_tokens=9) for number in range(20)))
    with running_server(http_port=0) as server:
        server.session.hold()
        process = started(files, server.address, "--http", f"127.0.0.1:{server.http_port}")
        server.wait_for_requests(4)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "0 lines are answered: the same command resumes" in said


def test_several_servers_are_one_address_or_a_name(run: Run, files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(40))  # so many never all have the same home
    with running_server() as one, running_server() as other:
        assert run(address=f"quill://{one.address},{other.address}")[0] == 0
        for server in (one, other):
            assert server.next_record("OK").method == "GetModel"
            assert server.next_record("OK").method == "Generate"
        several = files[1].read_bytes()
        files[1].unlink()
        name = f"quill+dns://localhost:{one.server.port}"
        assert run(address=name)[0] == 0
        assert files[1].read_bytes() == several
        write(files[0], posted(1, prompt="abc"))
        files[1].unlink()
        code, said = run(address=name)
    assert code == 1
    assert "give them with --http" in said


def test_results_come_in_order_and_no_more_run_than_may() -> None:
    running, most, turns = 0, 0, random.Random(3)
    taken: list[int] = []

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(turns.randrange(20)):
            await asyncio.sleep(0)
        running -= 1
        return item

    asyncio.run(in_order(range(200), work, taken.append, 5))
    assert taken == list(range(200))
    assert most == 5


def test_one_that_takes_long_holds_back_a_bounded_number() -> None:
    begun: list[int] = []
    taken: list[int] = []

    async def main() -> None:
        may_end = asyncio.Event()

        async def work(item: int) -> int:
            begun.append(item)
            if item == 0:
                await may_end.wait()
            return item

        whole = asyncio.create_task(in_order(range(1000), work, taken.append, 2))
        while len(begun) < 2 * AHEAD:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(begun) == 2 * AHEAD
        assert taken == []
        may_end.set()
        await whole

    asyncio.run(main())
    assert taken == list(range(1000))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_is_ready_before_an_end_is_taken(is_cancelled: bool) -> None:
    taken: list[int] = []
    ended: list[int] = []

    async def main() -> None:
        whole = asyncio.current_task()
        assert whole is not None

        async def work(item: int) -> int:
            try:
                if item == 3:
                    if not is_cancelled:
                        raise ValueError(item)
                    whole.cancel()
                if item > 2:
                    await asyncio.Event().wait()
            finally:
                ended.append(item)
            return item

        await in_order(range(10), work, taken.append, 5)

    with pytest.raises(asyncio.CancelledError if is_cancelled else ValueError):
        asyncio.run(main())
    assert taken == [0, 1, 2]
    assert {0, 1, 2, 3, 4} <= set(ended)
