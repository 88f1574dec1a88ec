"""A pytest plug-in: an engine's own tests audit its verifier.

    pytest --truedraw-verify MODULE:CALLABLE      one test for each problem and each edge case
    pytest --truedraw-process CMD                 the same for a program that speaks JSON lines

Without these options nothing is collected, and no part of the audit is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from truedraw.audit.convention import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("truedraw", "audit of a verifier of speculative decoding")
    group.addoption(
        "--truedraw-verify", metavar="MODULE:CALLABLE", help="audit this verifier: one test per problem and edge case"
    )
    group.addoption("--truedraw-process", metavar="CMD", help="the same for a program that speaks JSON lines")
    group.addoption("--truedraw-adapter", default="numpy", help="how the callable is called: numpy, torch, hugging-face, vllm")
    group.addoption("--truedraw-dtype", default="float64", help="of the arrays the callable is given: float64 or float32")
    group.addoption("--truedraw-tolerance", type=float, default=1e-6, help="total variation that arithmetic may cost")


def pytest_collection(session: pytest.Session) -> None:
    """Fail early, in one line, where what is named cannot be audited."""
    if _asked(session.config):
        from truedraw.errors import TruedrawError

        try:
            _subject(session.config)
        except TruedrawError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if _asked(config):
        collector = VerifierAudit.from_parent(session, name="truedraw", nodeid="truedraw")
        items.extend(collector.collect())


def pytest_unconfigure(config: pytest.Config) -> None:
    stack = config.stash.get(_STACK, None)
    if stack is not None:
        stack.close()


_STACK = pytest.StashKey[ExitStack]()
_SUBJECT = pytest.StashKey[Any]()


def _asked(config: pytest.Config) -> bool:
    return bool(config.getoption("--truedraw-verify") or config.getoption("--truedraw-process"))


def _subject(config: pytest.Config) -> Subject:
    """What is audited: made once, ended with the session."""
    if _SUBJECT not in config.stash:
        from truedraw.audit import adapters
        from truedraw.audit.process import program

        stack = config.stash[_STACK] = ExitStack()
        command, spec = config.getoption("--truedraw-process"), config.getoption("--truedraw-verify")
        if command:
            config.stash[_SUBJECT] = stack.enter_context(program(command))
        else:
            adapter, dtype = config.getoption("--truedraw-adapter"), config.getoption("--truedraw-dtype")
            function = adapters.load_callable(spec)
            config.stash[_SUBJECT] = adapters.subject(function, spec, adapter=adapter, dtype=dtype)
    subject: Subject = config.stash[_SUBJECT]
    return subject


class Fault(Exception):
    """What a test of the audit fails with."""


class VerifierAudit(pytest.Collector):
    """All tests of one verifier."""

    def collect(self) -> Iterator[pytest.Item]:
        from truedraw.audit.edge_cases import edge_cases
        from truedraw.audit.exact_law import problems

        subject = _subject(self.config)
        if subject.injected:
            for problem, steps in problems(min_drafts=subject.min_drafts):
                name = f"law[{problem.name}, drafts {' then '.join(map(str, steps))}]"
                yield self._item(name, partial(_law, self.config, problem, steps))
        else:
            yield self._item("law[by samples]", partial(_sampled, self.config))
        for case in edge_cases():
            if len(case.request.drafts) >= subject.min_drafts:
                yield self._item(f"edge[{case.name}]", partial(_edge, self.config, case))

    def _item(self, name: str, check: Callable[[], None]) -> pytest.Item:
        return VerifierTest.from_parent(self, name=name, check=check)


class VerifierTest(pytest.Item):
    """One problem or one edge case."""

    def __init__(self, *, check: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._check = check

    def runtest(self) -> None:
        self._check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from truedraw.audit.convention import Lost

        if isinstance(excinfo.value, Fault | Lost):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return "truedraw", None, self.name


def _law(config: pytest.Config, problem: Any, steps: Any) -> None:
    from truedraw.audit.exact_law import exact_mode

    mode = exact_mode(_subject(config), tolerance=config.getoption("--truedraw-tolerance"), picked=[(problem, steps)])
    _raise(mode)


def _sampled(config: pytest.Config) -> None:
    from truedraw.audit.function import Options
    from truedraw.audit.sampled_law import sampled_mode

    options = Options(alpha=1e-4)  # a test that is run every night may not cry wolf
    _raise(sampled_mode(_subject(config), alpha=options.alpha, detect=options.detect, seed=options.seed))


def _edge(config: pytest.Config, case: Any) -> None:
    from truedraw.audit.edge_cases import edge_mode

    _raise(edge_mode(_subject(config), [case]))


def _raise(mode: Any) -> None:
    if mode.verdict == "fault found":
        lines = [f"{fired.name}: usually {fired.usually}" for fired in mode.fired]
        if mode.example is not None:
            lines += [mode.example.text, mode.example.command]
        raise Fault("\n".join(line for line in lines if line))
