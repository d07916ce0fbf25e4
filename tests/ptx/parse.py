"""PTX as Triton writes it, to statements."""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"\s*(\$\w+):")
_STATEMENT = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


@dataclass(frozen=True)
class Statement:
    """opcode operands; executed by lanes whose guard holds (not holds, if negated)."""

    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Program:
    name: str
    parameters: list[str]
    statements: list[Statement]
    labels: dict[str, int]


def parse(ptx: str) -> Program:
    """The one entry point of a module."""
    entry = re.search(r"\.entry (\w+)\((.*?)\n\)(.*?)\n\{(.*?)\n\}", ptx, re.DOTALL)
    assert entry is not None, "no entry point"
    name, head, _, body = entry.groups()
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"^\s*\.(loc|reg|pragma|shared|file)\b[^\n]*", "", body, flags=re.MULTILINE)
    statements, labels = [], {}
    for piece in body.split(";"):
        piece = piece.lstrip("{} \t\n")  # the scope of inline assembly: its names are unique enough
        while label := _LABEL.match(piece):
            labels[label.group(1)] = len(statements)
            piece = piece[label.end() :].lstrip("{} \t\n")
        if not piece.strip() or piece.startswith("."):
            continue
        match = _STATEMENT.fullmatch(piece.strip())
        assert match is not None, piece
        negated, guard, opcode, rest = match.groups()
        operands = tuple(x.strip() for x in _OPERAND.findall(rest))
        statements.append(Statement(guard, bool(negated), opcode, operands, " ".join(piece.split())))
    return Program(name, re.findall(rf"{name}_param_\d+", head), statements, labels)
