"""What belongs beside every number."""

from quill.loadtest.environment.process import machine_info, memory_gib, num_cores


def test_machine_info_say_where_and_on_what() -> None:
    info = machine_info()
    assert list(info) == ["machine", "system", "commit", "command"]
    assert all(info.values())
    assert f"{num_cores()} cores" in info["machine"]
    assert memory_gib() > 0.1
