"""`quill eval --tasks`: on PyTorch, on a real server of ours, and on one that isn't ours."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quill.__main__ import main
from quill.model.benchmarks.backend import Backend, Sampling
from quill.model.benchmarks.items import ChoiceItem, ScoreRequest, TextItem, ToolItem
from quill.model.benchmarks.server_backends import GrpcBackend, HttpBackend
from quill.model.benchmarks.torch_backend import TorchBackend
from quill.model.checkpoint.checkpoint import Checkpoint, save_checkpoint
from quill.model.data.tokenizer import SpecialTokens, byte_tokenizer
from quill.server.client.access import Access
from tests.model.benchmarks.openai_server import other_server
from tests.server.running import RunningBundle
from tests.server.tiny_bundle import TinyBundle, make_talker

CHOICES = ChoiceItem(
    "0",
    (
        ScoreRequest("A dog", " is here"),
        ScoreRequest("A dog", " so"),
        ScoreRequest("A", " x"),
    ),
)
WORD = ChoiceItem("0", (ScoreRequest("A dog", " so"),))
SUM = TextItem("0", "Question: 3 + 4?\nAnswer:", "What is 3 + 4?", answer="7")
DOUBLE = TextItem(
    *("double", "def double(x):\n", "Write double(x)"),
    tests="assert double(4) == 8",
    before="def double(x):\n",
)
WEATHER = ToolItem(
    "w",
    "Is it warm in Paris?",
    (
        {
            "name": "weather.today",
            "description": "",
            "parameters": {
                "type": "dict",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    ),
    ({"weather.today": {"city": ["paris"]}},),
)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return make_talker(tmp_path_factory.mktemp("talker"), context=512)


@pytest.fixture(scope="module")
def checkpoint(talker: TinyBundle) -> Checkpoint:
    return Checkpoint(
        talker.model.config,
        dict(talker.model.state_dict()),
        byte_tokenizer(),
        SpecialTokens(bos=0, eos=0),
        stop_ids=(0,),
        chat_template=talker.manifest.chat_template,
    )


@pytest.fixture(scope="module")
def running(talker: TinyBundle) -> Iterator[RunningBundle]:
    server = RunningBundle(talker.directory, "fp32", http_port=0)
    server.start()
    yield server
    server.stop()
    server.join()


@pytest.fixture(scope="module")
def backends(checkpoint: Checkpoint, running: RunningBundle) -> dict[str, Backend]:
    return {
        "torch": TorchBackend(checkpoint, torch.device("cpu")),
        "grpc": GrpcBackend(running.address, Access(), 2),
        "http": HttpBackend(f"http://127.0.0.1:{running.http_port}", Access(), 2, None),
    }


def write_items(directory: Path, **tasks: list[Any]) -> Path:
    for name, items in tasks.items():
        lines = [json.dumps(dataclasses.asdict(item)) + "\n" for item in items]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


def evaluate(data: Path, *arguments: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """The exit code, results.json's tasks by name, and the answers."""
    out = data / "out"
    code = main(["eval", "--data", str(data), "--out", str(out), *arguments])
    if code:
        return code, {}, []
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    results = json.loads((out / "results.json").read_text())
    return code, {each["task"]: each for each in results["tasks"]}, answers


def test_all_backends_score_alike(backends: dict[str, Backend]) -> None:
    requests = [
        *(ScoreRequest("Hello there", " world"), ScoreRequest("Hello there", " you")),
        ScoreRequest("grüße 你", " 好 x"),
    ]
    expected = backends["torch"].score(requests)
    for name in ("grpc", "http"):
        found = backends[name].score(requests)
        assert [each.is_greedy for each in found] == [each.is_greedy for each in expected]
        totals = [each.log_likelihood for each in found]
        assert totals == pytest.approx([each.log_likelihood for each in expected], rel=1e-4)


def test_a_greedy_continuation_is_greedy_for_all_backends(backends: dict[str, Backend]) -> None:
    for name, backend in backends.items():
        text = backend.generate("Hello there", False, Sampling(max_new_tokens=3))
        if text.isascii() and text:
            (found,) = backend.score([ScoreRequest("Hello there", text)])
            assert found.is_greedy, name


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_backends_generate_alike(
    backends: dict[str, Backend], is_chat: bool, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=20, temperature=temperature, seed=3)
    texts = {backend.generate("Hello", is_chat, sampling) for backend in backends.values()}
    assert len(texts) == 1
    (text,) = texts
    stopped = dataclasses.replace(sampling, stop=(text[5:7],))
    texts = {backend.generate("Hello", is_chat, stopped) for backend in backends.values()}
    assert texts == {text[: text.index(text[5:7])]}


def test_a_checkpoint_and_its_server_get_the_same_figures(
    checkpoint: Checkpoint, running: RunningBundle, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "checkpoint", checkpoint)
    data = write_items(tmp_path, arc_easy=[CHOICES] * 3, lambada=[WORD], gsm8k=[SUM])
    http = f"http://127.0.0.1:{running.http_port}/v1"
    options = ("--tasks", "arc_easy,lambada,gsm8k", "--max-new-tokens", "8")
    found = [
        evaluate(data, *options, *source)
        for source in ([str(tmp_path / "checkpoint")], ["--server", running.address],
                       ["--server", http])
    ]  # fmt: skip
    for code, results, answers in found:
        assert code == 0
        assert [each["id"] for each in answers] == ["0"] * 5
        assert answers[4]["answer"] == found[0][2][4]["answer"]
        for name, result in results.items():
            assert result["num_errors"] == 0
            for metric, figure in result["figures"].items():
                expected = found[0][1][name]["figures"][metric]
                assert figure["value"] == pytest.approx(expected["value"], rel=1e-4)
                assert figure["low"] <= figure["value"] <= figure["high"]


def test_too_long_an_item_is_an_error_that_counts_as_wrong(
    running: RunningBundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = ChoiceItem("long", (ScoreRequest("x" * 900, " y"),))
    data = write_items(tmp_path, arc_easy=[CHOICES, long])
    code, results, answers = evaluate(data, "--tasks", "arc_easy", "--server", running.address)
    assert code == 0
    assert results["arc_easy"]["num_errors"] == 1
    assert "tokens" in answers[1]["error"]
    assert results["arc_easy"]["figures"]["acc"]["value"] <= 0.5
    write_items(tmp_path, arc_easy=[long])
    assert evaluate(data, "--tasks", "arc_easy", "--server", running.address)[0] == 1
    assert "tokens" in capfd.readouterr().err


def test_another_server_is_scored_by_its_echo(tmp_path: Path) -> None:
    data = write_items(tmp_path, arc_easy=[CHOICES] * 4, lambada=[WORD])
    with other_server(num_busy=2) as server:
        code, results, answers = evaluate(
            data, "--tasks", "arc_easy,lambada", "--server", server.url
        )
    assert code == 0
    assert answers[0]["answer"] == [-8.0, -3.0, -2.0]  # " is" and " here", " so", " x"
    figures = results["arc_easy"]["figures"]
    assert (figures["acc"]["value"], figures["acc_norm"]["value"]) == (0.0, 1.0)
    figures = results["lambada"]["figures"]
    assert figures["exact"]["value"] == 1.0
    assert figures["perplexity"]["value"] == pytest.approx(math.exp(3))


def test_another_server_calculates_writes_programs_and_calls_tools(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = dataclasses.replace(DOUBLE, tests="assert double(4) == 9")
    data = write_items(
        tmp_path, gsm8k=[SUM], humaneval=[DOUBLE, wrong], bfcl_simple=[WEATHER], mbpp=[DOUBLE]
    )
    with other_server() as server:
        source = ("--server", server.url, "--allow-code-execution")
        code, results, answers = evaluate(
            data, *source, "--chat", "--tasks", "humaneval,mbpp,bfcl_simple"
        )
        assert code == 0
        assert evaluate(data, *source, "--tasks", "gsm8k")[1]["gsm8k"]["figures"]["exact_match"][
            "value"
        ] == 1.0  # fmt: skip
        assert {each["model"] for each in server.requests} == {"words"}
    assert results["humaneval"]["figures"]["pass@1"]["value"] == 0.5
    assert results["mbpp"]["figures"]["pass@1"]["value"] == 1.0
    assert [each["passed"] for each in answers[0]["answer"]] == [True]
    assert results["bfcl_simple"]["figures"]["ast_match"]["value"] == 1.0
    assert results["bfcl_simple"]["figures"]["valid"]["value"] == 1.0
    assert "Programs ran with: limits" in capfd.readouterr().out


def test_samples_have_seeds_one_after_another(tmp_path: Path) -> None:
    data = write_items(tmp_path, humaneval=[DOUBLE])
    with other_server() as server:
        options = ("--samples", "3", "--temperature", "0.8", "--seed", "5", "--chat")
        source = ("--server", server.url, "--allow-code-execution", "--tasks", "humaneval")
        assert evaluate(data, *source, *options)[0] == 0
        assert [each["seed"] for each in server.requests] == [5, 6, 7]


def test_a_server_without_echo_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_items(tmp_path, arc_easy=[CHOICES])
    with other_server(has_echo=False) as server:
        assert evaluate(data, "--tasks", "arc_easy", "--server", server.url)[0] == 1
    assert "doesn't return the prompt's log-probabilities" in capfd.readouterr().err


def test_an_answer_without_choices_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_items(tmp_path, gsm8k=[SUM])
    with other_server(is_broken=True) as server:
        assert evaluate(data, "--tasks", "gsm8k", "--server", server.url)[0] == 1
    assert 'answered without `choices`: {"choices": []}' in capfd.readouterr().err


def test_a_server_without_models_is_named_and_earlier_results_stay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text("earlier")
    with other_server(has_models=False) as server:
        command = ["eval", "--server", server.url, "--tasks", "gsm8k", "--out", str(tmp_path)]
        assert main(command) == 1
    assert 'lists no model: {"data": null}' in capfd.readouterr().err
    assert (tmp_path / "results.json").read_text() == "earlier"


def test_an_api_key_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_items(tmp_path, arc_easy=[CHOICES])
    with other_server(key="secret") as server:
        source = ("--tasks", "arc_easy", "--server", server.url)
        assert evaluate(data, *source)[0] == 1
        assert "wrong key" in capfd.readouterr().err
        monkeypatch.setenv("QUILL_API_KEY", "secret")
        assert evaluate(data, *source)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "arc_easy"], "give one of them"),
        (["x", "--server", "y:1", "--tasks", "arc_easy"], "give one of them"),
        (["--server", "y:1"], "--server needs --tasks"),
        (["x", "--tasks", "arc"], "there is no task 'arc'; there are hellaswag"),
        (["x", "--tasks", "humaneval"], "Give --allow-code-execution to agree"),
        (["x", "--tasks", "piqa", "--shots", "6"], "--shots is 6; piqa has 0 to 5"),
        (["x", "--tasks", "piqa", "--limit", "0"], "--limit is 0"),
        (["x", "--tasks", "gsm8k", "--samples", "2"], "needs a --temperature"),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    assert told in capfd.readouterr().err


def test_a_bad_file_of_the_users_is_named(
    running: RunningBundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"id": "1"}\n')
    assert evaluate(tmp_path, "--tasks", "gsm8k", "--server", running.address)[0] == 1
    assert "line 1.chat is missing" in capfd.readouterr().err


def test_tool_calls_on_a_checkpoint_need_a_server(
    checkpoint: Checkpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "checkpoint", checkpoint)
    data = write_items(tmp_path, bfcl_simple=[WEATHER])
    assert evaluate(data, str(tmp_path / "checkpoint"), "--tasks", "bfcl_simple")[0] == 2
    assert "tool calls need a server" in capfd.readouterr().err


def test_our_server_calls_tools_that_are_valid(running: RunningBundle, tmp_path: Path) -> None:
    """The model is untrained: its calls are valid, and wrong."""
    city = {"type": "string", "enum": ["London", "Paris"]}
    parameters = {"type": "dict", "properties": {"city": city}, "required": ["city"]}
    item = dataclasses.replace(
        WEATHER,
        question="Hi",
        functions=({"name": "w.t", "description": "", "parameters": parameters},),
        answers=({"w.t": {"city": ["Rome"]}},),
    )
    data = write_items(tmp_path, bfcl_simple=[item])
    for server in (running.address, f"http://127.0.0.1:{running.http_port}"):
        options = ("--tool-choice", "required", "--max-new-tokens", "60", "--tasks", "bfcl_simple")
        code, results, answers = evaluate(data, "--server", server, *options)
        assert code == 0
        assert results["bfcl_simple"]["figures"]["valid"]["value"] == 1.0, answers
        assert results["bfcl_simple"]["figures"]["ast_match"]["value"] == 0.0
