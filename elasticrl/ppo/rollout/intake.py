"""An engine's end of weights from another node: piece by piece over a visitor's connection, or through a circle.

The idea: whoever begins anew is believed. The one before was cut off, or is of a gang that is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elasticrl.ppo.rollout.circle import Guest
from elasticrl.ppo.rollout.weights import Incoming, Torn

if TYPE_CHECKING:
    from pathlib import Path

    from elasticrl.ppo.rollout.wire import Frame


class Intake:
    """One engine's. Visitors go by number; Torn or Lost is what is to be said to them."""

    ops: Final = frozenset(["meet", "put", "cast", "piece", "whole"])

    def __init__(self, home: Path) -> None:
        self._home = home
        self._set: Incoming | None = None
        self._brings = -1  # who brings it
        self._circle: Guest | None = None
        self._met = -1  # who formed that
        self._cast_s: float | None = None  # how long the set may take through the circle; None: it comes in pieces

    def take(self, visitor: int, host: str, frame: Frame) -> bool:
        """What a visitor sent, who came to this address of ours. True: its set is whole."""
        says = frame.says
        try:
            if says["op"] == "meet":
                self._leave_circle()
                self._circle, self._met = Guest(says, host), visitor
            elif says["op"] in ("put", "cast"):
                self._drop()
                self._brings = visitor
                self._set = Incoming(self._home, says["page"])
                self._cast_s = says["within_s"] if says["op"] == "cast" else None
                if self._cast_s is not None:
                    self._mine(visitor).take(self._set)
            elif self._set is None or self._brings != visitor:
                raise Torn("somebody else has begun to bring weights since")
            elif says["op"] == "piece":
                self._set.take(frame.raw)
            else:
                if self._cast_s is not None:
                    self._mine(visitor).done(self._cast_s)
                self._set.done()
                self._drop()
                return True
        except Exception:  # whatever it was, it is raised again; a set that it was in the middle of is none
            if visitor == self._brings:
                self._drop()
            raise
        return False

    def left(self, visitor: int) -> None:
        """That visitor is gone, and what it brought with it."""
        if visitor == self._brings:
            self._drop()
        if visitor == self._met:
            self._leave_circle()

    def _mine(self, visitor: int) -> Guest:
        if self._circle is None or self._met != visitor:
            raise Torn("somebody else has formed a circle since")
        return self._circle

    def _drop(self) -> None:
        if self._set is not None:
            self._set.close()
        self._set, self._brings = None, -1

    def _leave_circle(self) -> None:
        if self._circle is not None:
            self._circle.leave()
        self._circle, self._met = None, -1
