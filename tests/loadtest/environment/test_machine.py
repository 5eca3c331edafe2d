"""What belongs beside every number."""

from quill.loadtest.environment.machine import machine_facts, memory_gib, num_cores


def test_machine_facts_say_where_and_on_what() -> None:
    facts = machine_facts()
    assert list(facts) == ["machine", "system", "commit", "command"]
    assert all(facts.values())
    assert f"{num_cores()} cores" in facts["machine"]
    assert memory_gib() > 0.1
