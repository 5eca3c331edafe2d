"""langchain-openai, against a real server."""

from typing import Any

import pytest

langchain = pytest.importorskip(
    "langchain_openai", reason="langchain-openai isn't installed here: make test-clients has it"
)

from tests.clients.conftest import PATIENCE_S, Server  # noqa: E402


@pytest.fixture
def chat(server: Server) -> Any:
    return langchain.ChatOpenAI(
        base_url=server.base_url,
        api_key=server.key,
        model=server.model,
        max_tokens=12,
        seed=5,
        timeout=PATIENCE_S,
    )


def test_invoke_and_stream_say_the_same(chat: Any) -> None:
    asked = [("system", "Be brief."), ("human", "Name a colour.")]
    whole = chat.invoke(asked)
    assert whole.content == "".join(str(chunk.content) for chunk in chat.stream(asked))
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")


def test_batch(chat: Any) -> None:
    one, other = chat.batch(["Name a colour.", "Name a colour."])
    assert one.content == other.content


def test_completions(server: Server) -> None:
    llm = langchain.OpenAI(
        base_url=server.base_url, api_key=server.key, model=server.model, max_tokens=6, seed=1
    )
    answer = llm.generate(["Once upon a time", "The sea"])
    assert [len(each) for each in answer.generations] == [1, 1]
    assert "".join(llm.stream("Once upon a time")) == answer.generations[0][0].text


def test_embeddings(embedder: Server) -> None:
    embeddings = langchain.OpenAIEmbeddings(
        base_url=embedder.base_url,
        api_key=embedder.key,
        model=embedder.model,
        check_embedding_ctx_length=False,
    )
    vectors = embeddings.embed_documents(["A cat", "A dog"])
    assert vectors[0] != vectors[1]
    assert embeddings.embed_query("A cat") == pytest.approx(vectors[0], rel=1e-6)


def test_tools_are_called(chat: Any) -> None:
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        return a * b

    for choice in ("any", "multiply"):
        tooled = chat.bind_tools([multiply], tool_choice=choice, max_tokens=60)
        said = tooled.invoke("What is 6 times 7?")
        (call,) = said.tool_calls
        assert call["name"] == "multiply"
        assert {type(value) for value in call["args"].values()} == {int}
        chunks = list(tooled.stream("What is 6 times 7?"))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert total.tool_calls == said.tool_calls


def test_structured_output_keeps_to_its_schema(chat: Any) -> None:
    schema = {
        "title": "Colour",
        "type": "object",
        "properties": {"name": {"type": "string", "enum": ["red", "green"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    structured = chat.with_structured_output(schema, method="json_schema")
    assert structured.invoke("Name a colour.")["name"] in ("red", "green")
