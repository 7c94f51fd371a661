"""Characters and stop strings, against the plainest statement of what should come out."""

from __future__ import annotations

import itertools
import time
from typing import AnyStr

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamapipe.text import StopChecker, TextStream, Utf8Assembler


def cut(data: AnyStr, where: list[int]) -> list[AnyStr]:
    """Cut `data` at the positions `where` (taken modulo its length), empty parts included."""
    edges = [0, *sorted(c % (len(data) + 1) for c in where), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is shown of the whole `text`, and its stop string: the first complete, the longest of equals."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def tail_to_hold(text: str, stops: list[str]) -> int:
    """Length of the longest tail of `text` that some stop string begins with."""
    return max((n for n in range(len(text) + 1) for s in stops if n and s.startswith(text[-n:])), default=0)


# Small alphabets make repeats and overlaps likely; the bytes mix whole characters with broken ones.
small_text = st.text(alphabet="ab\u20ac", max_size=24)
small_stops = st.lists(st.text(alphabet="ab\u20ac", min_size=1, max_size=5), min_size=1, max_size=5)
mixed_bytes = st.lists(
    st.one_of(st.binary(max_size=4), st.text(max_size=3).map(lambda s: s.encode("utf-8", "replace"))),
    max_size=12,
).map(b"".join)
cuts = st.lists(st.integers(min_value=0, max_value=80), max_size=20)


class TestUtf8Assembler:
    @given(mixed_bytes, cuts)
    @example(b"\xed\xa0\x80", [1, 2])
    @example(b"\xf0\x90\x80", [1, 2])
    def test_equals_decoding_the_whole(self, data: bytes, where: list[int]) -> None:
        assembler = Utf8Assembler()
        text = "".join([assembler.feed(piece) for piece in cut(data, where)])
        assert len(assembler.pending) <= 3
        assert text + assembler.finish() == data.decode("utf-8", "replace")
        assert assembler.finish() == ""

    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(min_value=1, max_value=3))
    def test_nothing_is_broken_or_late_in_good_text(self, text: str, size: int) -> None:
        data = text.encode()
        assembler, shown = Utf8Assembler(), ""
        for at in range(0, len(data), size):
            shown += assembler.feed(data[at : at + size])
            assert shown == data[: at + size].decode("utf-8", "ignore")  # each character with its last byte
        assert assembler.finish() == ""

    def test_a_character_waits_for_its_last_byte(self) -> None:
        assembler = Utf8Assembler()
        assert [assembler.feed(bytes([b])) for b in "🦙!".encode()] == ["", "", "", "🦙", "!"]

    def test_bytes_that_cannot_become_a_character_do_not_wait(self) -> None:
        assembler = Utf8Assembler()
        assert assembler.feed(b"a\xff") == "a\ufffd"
        assert assembler.feed(b"\xe2\x82") == ""
        assert assembler.feed(b"b") == "\ufffdb"

    def test_finish_shows_the_rest_and_starts_afresh(self) -> None:
        assembler = Utf8Assembler()
        assert assembler.feed(b"ab\xf0\x9f") == "ab"
        assert "xf0" in repr(assembler)
        assert assembler.finish() == "\ufffd"
        assert assembler.feed(b"c") == "c"


class TestStopChecker:
    @given(small_text, small_stops, cuts)
    @example("aaab", ["aaaa", "aab"], [])
    @example("bab", ["abab", "ab"], [1, 2])
    @example("xabz", ["xabz", "ab"], [3])
    def test_shows_what_the_whole_text_says(self, text: str, stops: list[str], where: list[int]) -> None:
        whole, stop = expected(text, stops)
        checker, shown, seen = StopChecker(stops), "", ""
        for part in cut(text, where):
            seen += part
            shown += checker.feed(part)
            if checker.matched is None:
                assert shown == seen[: len(seen) - tail_to_hold(seen, stops)]  # no less and no more
                assert shown + checker.held == seen
        assert checker.matched == stop
        assert shown + checker.finish() == whole
        assert checker.finish() == ""

    def test_nothing_of_a_stop_string_is_shown(self) -> None:
        checker = StopChecker(["</end>"])
        shown = [checker.feed(part) for part in ("Hi", " <", "/en", "d", ">", "more")]
        assert shown == ["Hi", " ", "", "", "", ""]
        assert checker.matched == "</end>"
        assert checker.finish() == ""

    def test_a_false_start_is_shown_as_soon_as_it_is_one(self) -> None:
        checker = StopChecker(["aab"])
        assert checker.feed("a") == ""
        assert checker.feed("a") == ""
        assert checker.feed("a") == "a"
        assert checker.feed("c") == "aac"
        assert checker.matched is None

    def test_the_first_to_be_complete_wins_over_one_that_began_earlier(self) -> None:
        checker = StopChecker(["xabz", "ab"])
        assert checker.feed("xa") == ""
        assert checker.feed("bz") == "x"
        assert checker.matched == "ab"

    def test_the_longest_of_those_complete_together_wins(self) -> None:
        checker = StopChecker(["b", "ab", "cab"])
        assert checker.feed("xcab") == "x"
        assert checker.matched == "cab"

    def test_held_text_comes_out_at_the_end(self) -> None:
        checker = StopChecker(["STOP"])
        assert checker.feed("go STO") == "go "
        assert "STO" in repr(checker)
        assert checker.finish() == "STO"
        assert checker.matched is None

    def test_no_stop_strings_pass_everything(self) -> None:
        checker = StopChecker([])
        assert checker.feed("anything") == "anything"
        assert checker.finish() == ""

    @pytest.mark.parametrize("stops", [[""], ["a", ""]])
    def test_an_empty_stop_string_is_refused(self, stops: list[str]) -> None:
        with pytest.raises(ValueError, match="stop: an empty string"):
            StopChecker(stops)

    def test_a_single_string_is_refused_with_the_fix(self) -> None:
        with pytest.raises(TypeError, match=r"pass \['ab'\]"):
            StopChecker("ab")

    @pytest.mark.parametrize("stops", [[b"a"], [1], ["a", None], [["a"]]])
    def test_other_types_are_refused(self, stops: list[str]) -> None:
        with pytest.raises(TypeError, match="stop: expected strings, got"):
            StopChecker(stops)

    def test_work_grows_with_the_text_and_not_with_the_stop_strings(self) -> None:
        """The hardest input: every character continues hundreds of stop strings. Rescanning takes minutes."""

        def seconds(n_characters: int, stops: list[str]) -> float:
            checker, best = StopChecker(stops), float("inf")
            for _ in range(3):
                start = time.perf_counter()
                for _ in range(n_characters):
                    checker.feed("a")
                best = min(best, time.perf_counter() - start)
                assert len(checker.finish()) == len(stops)
            return best

        few = seconds(20_000, ["a" + "b"])
        many = seconds(20_000, ["a" * n + "b" for n in range(1, 401)])
        assert many < 30 * few + 0.1


class TestTextStream:
    @given(mixed_bytes, st.lists(st.text(min_size=1, max_size=3), max_size=3), cuts)
    @example(b"ab\xe2\x82", ["\ufffd"], [])
    @example("a\u20ac\u20ac".encode(), ["\u20ac\u20ac"], [2, 3, 5])
    def test_equals_the_whole_text_up_to_the_stop_string(
        self, data: bytes, stops: list[str], where: list[int]
    ) -> None:
        whole, stop = expected(data.decode("utf-8", "replace"), stops)
        stream, shown = TextStream(stops), ""
        for piece in cut(data, where):
            shown += stream.push(piece)
            assert stream.stopped == (stream.matched is not None)
        shown += stream.finish()
        assert shown == whole
        assert stream.matched == stop
        assert stream.stopped == (stop is not None)

    def test_a_stop_string_across_pieces_and_inside_characters(self) -> None:
        stream = TextStream(["🦙."])
        pieces = [b"A \xf0\x9f", b"\xa6", b"\x99", b". B"]
        assert [stream.push(piece) for piece in pieces] == ["A ", "", "", ""]
        assert stream.stopped
        assert stream.push(b"more") == ""
        assert stream.finish() == ""
        assert stream.stopped

    def test_without_stop_strings(self) -> None:
        stream = TextStream()
        assert stream.push(b"caf\xc3") == "caf"
        assert stream.push(b"\xa9") == "é"
        assert stream.push(b"\xf0") == ""
        assert (stream.stopped, stream.matched, stream.held) == (False, None, "")
        assert "stopped=False" in repr(stream)
        assert stream.finish() == "\ufffd"

    def test_held_text_is_visible_to_the_owner(self) -> None:
        stream = TextStream(("END",))
        assert stream.push(b"the EN") == "the "
        assert stream.held == "EN"
        assert stream.finish() == "EN"

    def test_a_single_string_is_refused(self) -> None:
        with pytest.raises(TypeError, match="stop"):
            TextStream("ab")
