from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from bench.traces.reader import read_trace
from bench.traces.request import BadTrace, TraceRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
PLAIN = "arrival_s,input_tokens,output_tokens\n"
MOON = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_reads_normalised_rows_and_keeps_their_zero(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, PLAIN + "2.5,10,3\n4,1,1\n"))
    assert trace.requests == (TraceRequest(2.5, 10, 3), TraceRequest(4.0, 1, 1))
    assert trace.span_s == 4.0


def test_reads_the_optional_model_column(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, "arrival_s,input_tokens,output_tokens,model\n0,1,1,big\n1,1,1,\n"))
    assert [request.model for request in trace.requests] == ["big", None]


def test_reads_azure_rows_rebased_with_seven_decimals_and_no_last_newline(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 23:59:59.9799600,48,10\n2023-11-17 00:00:00.0319605,31,8"
    trace = read_trace(_write(tmp_path, text))
    assert [request.arrival_s for request in trace.requests] == pytest.approx([0.0, 0.0520005], abs=1e-6)
    assert trace.requests[1].input_tokens == 31


def test_reads_burstgpt_rows_and_counts_failures(tmp_path: Path) -> None:
    text = BURST + "100.0,GPT-4,5,7,12,API log\n101,ChatGPT,9,0,9,API log\n103,GPT-4,0,3,3,API log\n104,GPT-4,1,2,3,x\n"
    trace = read_trace(_write(tmp_path, text))
    assert trace.requests == (TraceRequest(0.0, 5, 7, "GPT-4"), TraceRequest(4.0, 1, 2, "GPT-4"))
    assert trace.skipped_rows == 2


def test_reads_gzip_and_windows_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + PLAIN.replace("\n", "\r\n").encode() + b"0,1,2\r\n"))
    assert read_trace(path).requests == (TraceRequest(0.0, 1, 2),)


def test_reads_mooncakes_json_lines_rebased_and_counts_rows_without_tokens(tmp_path: Path) -> None:
    text = MOON + '\n{"timestamp": 28000.5, "input_length": 3, "output_length": 0, "hash_ids": []}\n'
    trace = read_trace(_write(tmp_path, text + '{"timestamp": 30535, "input_length": 1, "output_length": 2, "x": 1}'))
    assert trace.requests == (TraceRequest(0.0, 6955, 52), TraceRequest(pytest.approx(3.053), 1, 2))
    assert (trace.skipped_rows, trace.whole_seconds) == (1, False)


def test_sorts_by_arrival_and_says_how_many_rows_were_out_of_order(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, PLAIN + "3,1,1\n1,2,2\n2,1,1\n0,0,0\n"))
    assert [request.arrival_s for request in trace.requests] == [1.0, 2.0, 3.0]
    assert (trace.unsorted_rows, trace.skipped_rows) == (2, 1)


@pytest.mark.parametrize(
    ("text", "to_the_second"),
    [
        (BURST + "1.0,GPT-4,5,7,12,API log\n2,GPT-4,9,1,9,API log\n", True),
        (BURST + "1.5,GPT-4,5,7,12,API log\n2,GPT-4,9,1,9,API log\n", False),
        (PLAIN + "1,1,1\n1,2,2\n4,1,1\n", True),
        (PLAIN + "1,1,1\n2,2,2\n4,1,1\n", False),
        (PLAIN + "1,1,1\n1,2,2\n4.5,1,1\n", False),
        (AZURE + "2023-11-16 18:17:03,1,1\n2023-11-16 18:17:03,1,1\n", False),
    ],
)
def test_arrivals_that_are_known_to_the_second_only_are_recognised(
    tmp_path: Path, text: str, to_the_second: bool
) -> None:
    assert read_trace(_write(tmp_path, text)).whole_seconds is to_the_second


@pytest.mark.parametrize(
    ("text", "line", "column", "value"),
    [
        (PLAIN + "0,1,1\nsoon,1,1\n", 3, "arrival_s", "soon"),
        (PLAIN + "nan,1,1\n", 2, "arrival_s", "nan"),
        (PLAIN + "-1,1,1\n", 2, "arrival_s", "-1"),
        (PLAIN + "0,1.5,1\n", 2, "input_tokens", "1.5"),
        (PLAIN + "0,1,-4\n", 2, "output_tokens", "-4"),
        (PLAIN + "0,1,²\n", 2, "output_tokens", "²"),
        (AZURE + "2023-13-16 18:17:03.97,1,1\n", 2, "TIMESTAMP", "2023-13-16 18:17:03.97"),
        (AZURE + "2023-11-16 18:17:03.97,,1\n", 2, "ContextTokens", ""),
        (BURST + "1,GPT-4,x,1,1,API log\n", 2, "Request tokens", "x"),
        (BURST + "-1,GPT-4,1,1,1,API log\n", 2, "Timestamp", "-1"),
        (MOON + '{"timestamp": -1, "input_length": 1, "output_length": 1}', 2, "timestamp", "-1"),
        (MOON + '{"timestamp": "1", "input_length": 1, "output_length": 1}', 2, "timestamp", '"1"'),
        (MOON + '{"timestamp": 1, "input_length": 1.5, "output_length": 1}', 2, "input_length", "1.5"),
        (MOON + '{"timestamp": 1, "input_length": true, "output_length": 1}', 2, "input_length", "true"),
        (MOON + '{"timestamp": 1, "input_length": 1}', 2, "output_length", "absent"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path: Path, text: str, line: int, column: str, value: str) -> None:
    with pytest.raises(BadTrace) as caught:
        read_trace(_write(tmp_path, text))
    error = caught.value
    assert (error.line, error.column, error.value) == (line, column, value)
    for part in ("trace.csv", f"line {line}", column, repr(value)):
        assert part in error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("a,b,c\n1,2,3\n", "no known trace format"),
        (PLAIN + "0,1\n", "expected 3 columns, found 2"),
        (PLAIN, "no requests"),
        (PLAIN + "0,0,1\n", "no requests (1 rows"),
        (MOON + "{torn", "line 2: not JSON"),
        (MOON + "17", "line 2: expected a JSON object, not '17'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "no requests (1 rows"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadTrace, match=words.replace("(", r"\(")):
        read_trace(_write(tmp_path, text))


def test_missing_truncated_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="no such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(BadTrace, match="cannot be read"):
        read_trace(tmp_path)
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(gzip.compress((PLAIN + "0,1,1\n" * 500).encode())[:-12])
    with pytest.raises(BadTrace, match="cannot be read"):
        read_trace(torn)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(PLAIN.encode() + b"\xff\xfe\x00\n")
    with pytest.raises(BadTrace, match="not a text file"):
        read_trace(binary)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN + "0,1,1\n1," + "9" * 5000 + ",1\n", "line 3, column 'input_tokens': expected a number of tokens"),
        (MOON.replace("6955", "9" * 400), "line 1, column 'input_length': expected a number of tokens"),
        (MOON.replace("27482", "9" * 400), "line 1, column 'timestamp': expected milliseconds"),
        (PLAIN + "0,1,1\n1e300,1,1\n", "more than a year"),
        (PLAIN + "1700000000,1,1\n1700000001,1,1\n", "more than a year"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadTrace, match=re.escape(said)):
        read_trace(_write(tmp_path, text))


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    packed = gzip.compress((PLAIN + "".join(f"{n},{n % 97 + 1},3\n" for n in range(3000))).encode())
    path.write_bytes(packed[:100] + b"\xff" * 8 + packed[108:])
    with pytest.raises(BadTrace, match="cannot be read"):
        read_trace(path)
