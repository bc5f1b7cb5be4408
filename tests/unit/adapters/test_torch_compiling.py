"""What is read of torch's own frames when a compile begins; each test fails on the torch that renames them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from cachepipe.adapters.torch_compiling import CAPTURES, Compiling, compiling, late_compile_error, watch_compiles
from cachepipe.errors import LateCompileError


def test_the_locals_and_triggers_that_are_read_exist() -> None:
    from torch._dynamo import callback, convert_frame

    names = convert_frame._compile.__code__.co_varnames + convert_frame._compile.__code__.co_cellvars
    assert {"frame", "code"} <= {*names, *inspect.signature(convert_frame._compile).parameters}
    assert "recompile_reason" in names
    assert {trigger.name for trigger in callback.CallbackTrigger} >= {"DYNAMO", "LAZY_BACKWARD", *CAPTURES}


def test_torch_forgets_callbacks_at_a_reset_and_ours_stay() -> None:
    from torch._dynamo.callback import CallbackTrigger, CompilationCallbackHandler

    told: list[str] = []
    handler = CompilationCallbackHandler([], [])
    handler.register_start_callback(lambda args: told.append(f"theirs {args.compile_id}"))
    watch_compiles(
        SimpleNamespace(callback_handler=handler),
        lambda args: told.append(f"start {args.compile_id}"),
        lambda args: told.append(f"end {args.compile_id}"),
    )
    for number in ("0/0", "0/1", "0/2"):
        with handler.install_callbacks(CallbackTrigger.DYNAMO, number):
            told.append("compile")
        handler.clear()
    assert told[:4] == ["theirs 0/0", "start 0/0", "compile", "end 0/0"]
    assert told[4:] == ["start 0/1", "compile", "end 0/1", "start 0/2", "compile", "end 0/2"]


def test_the_error_is_of_a_class_that_torch_never_suppresses_and_says_all_in_one_line() -> None:
    from torch._dynamo.exc import UncapturedHigherOrderOpError, augment_exc_message

    what = Compiling("forward (/srv/model.py:31)", "/srv/service.py:12 in ask", {"x": [5, 8], "n": []}, "size mismatch")
    error = late_compile_error(what, "ask `entry.covered`")
    assert isinstance(error, LateCompileError) and isinstance(error, UncapturedHigherOrderOpError)
    augment_exc_message(error)  # as torch does with every error of a compile
    text = str(error)
    assert text.startswith("compile after `ready()`: forward (/srv/model.py:31) with x 5×8, n scalar")
    assert "called at /srv/service.py:12 in ask because size mismatch" in text and "\n" not in text
    assert text.endswith("; ask `entry.covered`") and error.hint == "ask `entry.covered`" and error.exit_code == 18


def test_an_argument_that_breaks_when_it_is_looked_at_costs_the_facts_and_not_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise RuntimeError("a user's __getattr__")

    monkeypatch.setattr("cachepipe.adapters.torch_compiling._frames", broken)
    assert compiling() == Compiling()


def test_outside_of_a_compile_only_the_call_is_known() -> None:
    found = compiling()
    assert found.place == "" and found.sizes == {} and "test_torch_compiling.py" in found.call_site
