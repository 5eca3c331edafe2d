"""How a batch tells how it gets on."""

import io

from quill.server.client.tools.batch_output import Progress


def test_what_is_told() -> None:
    now_s = 0.0
    progress = Progress(num_all=10_000, num_before=4_000, stream=io.StringIO(), clock=lambda: now_s)
    assert progress.text() == "[#########...............] 4,000/10,000 lines  0 tokens/s"
    for number in range(1_000):
        progress.add(20, is_error=number < 3)
    now_s = 20.0
    told = "[############............] 5,000/10,000 lines  1,000 tokens/s  3 failed  1:40 left"
    assert progress.text() == told
    for _ in range(5_000):
        progress.add(20, is_error=False)
    now_s = 3_700.0
    assert progress.text().endswith(" 10,000/10,000 lines  32 tokens/s  3 failed  took 1:01:40")


def test_a_line_is_told_now_and_then_where_there_is_no_terminal() -> None:
    now_s, stream = 0.0, io.StringIO()
    progress = Progress(num_all=30, num_before=0, stream=stream, clock=lambda: now_s)
    for _ in range(30):
        now_s += 1
        progress.add(1, is_error=False)
    progress.end()
    assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == [
        "10/30 lines  1 tokens/s  0:20 left",
        "20/30 lines  1 tokens/s  0:10 left",
        "30/30 lines  1 tokens/s  took 0:30",
        "30/30 lines  1 tokens/s  took 0:30",
    ]
