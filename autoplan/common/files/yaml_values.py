"""YAML as plain values, built from the parser's events under limits: no tags, no expanded aliases, bounded depth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

MOST_VALUES = 100_000  # an alias counts as many as its target
_AHEAD = 4096  # characters before an error, more than a parser looks ahead on a line
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN = {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null")}


@dataclass
class _Open:
    """A collection that has begun and not ended. `key` waits for its value."""

    value: Any
    anchor: str | None
    size: int = 1
    key: str | None = None


class TooDeep(yaml.MarkedYAMLError):
    """Collections are nested deeper than is read."""


@dataclass
class YamlReader:
    """Reads one document. `repeated`: a key may occur twice in a mapping."""

    most_depth: int
    most_digits: int
    repeated: bool = False
    stack: list[_Open] = field(default_factory=list)
    named: dict[str, tuple[Any, int]] = field(default_factory=dict)
    values: int = 0
    result: Any = None

    def read(self, text: str, loader: Any = _LOADER) -> Any:
        documents = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    _refuse(event, "a second document begins here; only one is allowed")
            elif isinstance(event, yaml.NodeEvent):
                self._node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                done = self.stack.pop()
                self._place(done.value, done.size, done.anchor, event)
        return self.result

    def _node(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.named:
                inside = any(collection.anchor == event.anchor for collection in self.stack)
                _refuse(event, f"*{event.anchor} {'contains itself' if inside else 'is not defined before it'}")
            self._place(*self.named[event.anchor], None, event)
            return
        if event.tag is not None and event.tag != "!":
            _refuse(event, f"the tag {event.tag[:60]} is not allowed for plain data")
        if isinstance(event, yaml.ScalarEvent):
            self._place(self._scalar(event), 1, event.anchor, event)
            return
        if len(self.stack) >= self.most_depth:
            raise TooDeep(problem=f"nested deeper than {self.most_depth} levels", problem_mark=event.start_mark)
        if self.stack and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None:
            _refuse(event, "a key of a mapping must be text, not a list or a mapping")
        self.stack.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor))

    def _place(self, value: Any, size: int, anchor: str | None, event: Any) -> None:
        """Put a value into the innermost open collection, or make it the result."""
        self.values += size
        if self.values > MOST_VALUES:
            _refuse(event, f"more than {MOST_VALUES:,} values, counting aliases by what they refer to")
        if anchor is not None:
            self.named[anchor] = (value, size)
        if not self.stack:
            self.result = value
            return
        top = self.stack[-1]
        top.size += size
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is None:
            top.key = self._key(value, top.value, event)
        else:
            top.value[top.key], top.key = value, None

    def _key(self, value: Any, known: dict[str, Any], event: Any) -> str:
        if not isinstance(value, str):
            kind = type(value).__name__
            _refuse(event, f"a key of a mapping must be text, but {str(value)[:40]!r} is read as a {kind}: quote it")
        if value in known and not self.repeated:
            _refuse(event, f"duplicate key {value[:80]!r}")
        return value

    def _scalar(self, event: Any) -> Any:
        if event.style or not event.implicit[0]:  # quoted, or a block of text
            return event.value
        tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
        kind = _PLAIN.get(tag)
        if kind == "str":
            return event.value
        if kind is None:
            tag_name = tag.rpartition(":")[2]
            _refuse(event, f"{event.value[:40]!r} is read as a {tag_name}, which is not plain data: quote it")
        if len(event.value) > self.most_digits:
            _refuse(event, f"a number of {len(event.value):,} digits: at most {self.most_digits} are read")
        node = yaml.ScalarNode(tag, event.value)
        return getattr(_CONSTRUCTOR, f"construct_yaml_{kind}")(node)


def stops_in_a_nest(text: str, mark: yaml.Mark | None, most_depth: int, most_digits: int) -> bool:
    """Return whether libyaml gave up at `mark` because its line is nested too deep, as Python's parser counts."""
    if mark is None:
        return False
    line = text[max(0, mark.index - _AHEAD) : mark.index].rpartition("\n")[2]
    try:
        YamlReader(most_depth, most_digits).read(line, yaml.SafeLoader)
    except TooDeep:
        return True
    except (yaml.YAMLError, ValueError):
        return False
    return False


_RESOLVER = yaml.resolver.Resolver()
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def _refuse(event: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
