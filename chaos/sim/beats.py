"""Neighbours' beats, derived from who can hear whom; message by message where some of them are lost.

The one idea: as long as a sender is audible its newest beat is known without sending it, so only changes cost anything. At
a change the detector is told of the last beat that came through and is asked again when its patience ends.
"""

from collections import defaultdict
from math import floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.sim.cluster import Cluster
    from chaos.sim.node import Node

LAG_S = 0.0003


class Beats:
    """All beats between all neighbours."""

    def __init__(self, cluster: "Cluster", *, each: bool) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.each = each  # every beat is a message of its own
        self.beat_s = cluster.settings.membership.beat_s
        self.suspect_s = cluster.settings.membership.suspect_s
        # Nobody is asked here: a beat that was due before a doubt may be on its way, and the next one is not late by half.
        self.doubt_s = 1.5 * self.beat_s
        self.listeners: defaultdict[str, set[str]] = defaultdict(set)
        self.rings: dict[str, tuple[str, ...]] = {}
        self.silent: set[tuple[str, str]] = set()
        self.loops: set[tuple[str, str]] = set()
        self.changes = 0  # rises whenever somebody may have become audible or silent

    def ring(self, name: str, ring: tuple[str, ...]) -> None:
        """This node listens to these others from now on."""
        self.changes += 1
        before = self.rings.get(name, ())
        self.rings[name] = ring
        for other in before:
            if other not in ring:
                self.listeners[other].discard(name)
                self.silent.discard((other, name))
        for other in ring:
            self.listeners[other].add(name)
            if self._by_message(other, name):
                self._loop(other, name)
            if other in before:
                self._compare(other, name)
                continue
            self.silent.discard((other, name))
            if not self.audible(other, name):
                self.silent.add((other, name))
            self._judge_in(name, self.suspect_s + 0.001)
        for receiver in sorted(self.listeners[name]):
            self._compare(name, receiver)

    def stands(self, name: str, ring: tuple[str, ...]) -> bool:
        """Is this its ring already, and no message of its own due in it? Who is audible depends on rings and lives alone."""
        return self.rings.get(name) == ring and self.sends_none

    @property
    def sends_none(self) -> bool:
        """Is no beat a message of its own?"""
        return not (self.each or self.cluster.net.lossy)

    def audible(self, sender: str, receiver: str) -> bool:
        """Do the sender's beats reach the receiver now? A node beats only for the neighbours of its own plan, but it answers a
        neighbour by another's plan that asks this very life. Found by seed 7311124: half of the nodes had not read a plan yet.
        """
        node, net = self.cluster.nodes.get(sender), self.cluster.net
        if node is None or not node.answers or (net.cut_nodes and not net.hears(sender, receiver, "beat")):
            return False
        if receiver in self.rings.get(sender, ()):
            return True
        peer = self.cluster.nodes[receiver].detector.peers.get(sender)
        return peer is not None and peer.life == node.incarnation and net.hears(receiver, sender, "beat")

    def changed(self, name: str) -> None:
        """Something about this node, or a link of it, is other than before."""
        self.changes += 1
        for receiver in sorted(self.listeners[name]):
            self._compare(name, receiver)
        for sender in self.rings.get(name, ()):
            self._compare(sender, name)

    def quiet(self, node: "Node") -> bool:
        """Has this node heard each neighbour since anything spoke against it? Then a right detector would say nothing, and can
        be told of the newest beats at any later time. (A wrong one is looked for in small clusters, which always ask it.)
        """
        name, was, changes = node.name, node.quiet, self.changes
        if was[0] is node.detector and was[1] == changes and self.sends_none:
            return True
        for peer, heard in node.detector.peers.items():
            if heard.suspected or (self.silent and (peer, name) in self.silent) or self._by_message(peer, name):
                return False
            if not self.audible(peer, name):
                return False
            if heard.doubted is not None and self._local(node, self._last_beat(peer)) <= heard.doubted:
                return False
        node.quiet = node.detector, changes
        return True

    def refresh(self, node: "Node") -> None:
        """Bring the detector up to the newest beat of each neighbour that is audible."""
        for peer in node.detector.peers:
            self._catch_up(node, peer, self._last_beat(peer))

    def _catch_up(self, node: "Node", peer: str, beat: float) -> None:
        heard = node.detector.peers.get(peer)
        name = node.name
        if heard is None or (self.silent and (peer, name) in self.silent) or self._by_message(peer, name):
            return
        if self.audible(peer, name):
            last = self._local(node, beat)
            if last > heard.last and (heard.doubted is None or last > heard.doubted):
                node.detector = node.detector.hear(peer, last)

    def doubt(self, name: str) -> None:
        """Connections to this node broke: those who listen to it look twice."""
        nodes = [self.cluster.nodes[receiver] for receiver in sorted(self.listeners[name])]
        nodes = [node for node in nodes if node.awake]
        beat = self._last_beat(name)
        for node in nodes:
            self._catch_up(node, name, beat)
            node.detector = node.detector.doubt(name, node.clock.now())
        if nodes:
            self.world.later(self.doubt_s + 0.001, self._judge, nodes)
            self.world.later(2 * LAG_S, self._refused, [(name, node) for node in nodes])

    def doubt_all(self, node: "Node") -> None:
        """Somebody's worker has left the gang: each neighbour may be gone."""
        ring = self.rings.get(node.name, ())
        for name in ring:
            self._catch_up(node, name, self._last_beat(name))
            node.detector = node.detector.doubt(name, node.clock.now())
        if ring:
            self.world.later(self.doubt_s + 0.001, self._judge, [node] * len(ring))
            self.world.later(2 * LAG_S, self._refused, [(name, node) for name in ring])

    def _judge(self, nodes: "list[Node]") -> None:
        self.world.events += len(nodes) - 1  # each is one
        for node in nodes:
            node.judge()

    def _refused(self, doubts: "list[tuple[str, Node]]") -> None:
        """Each doubted node is asked: where nothing of it runs any more, its kernel says so."""
        self.world.events += len(doubts) - 1  # each is one
        net = self.cluster.net
        for name, node in doubts:
            asked = self.cluster.nodes[name]
            refuses = asked.powered and not (asked.frozen or asked.daemon_up or asked.agent_up)
            if refuses and node.awake and net.hears(node.name, name, "beat") and net.hears(name, node.name, "beat"):
                node.detector = node.detector.gone(name)
                node.judge()

    def lossy(self, name: str) -> None:
        """Some of this node's beats are lost from now on."""
        for receiver in sorted(self.listeners[name]):
            self._loop(name, receiver)
        for sender in self.rings.get(name, ()):
            self._loop(sender, name)

    def _by_message(self, sender: str, receiver: str) -> bool:
        lossy = self.cluster.net.lossy
        return self.each or (bool(lossy) and (sender in lossy or receiver in lossy))

    def _compare(self, sender: str, receiver: str) -> None:
        pair = (sender, receiver)
        if self._by_message(sender, receiver):
            return
        audible = self.audible(sender, receiver)
        if audible == (pair not in self.silent):
            return
        node = self.cluster.nodes[receiver]
        if audible:
            self.silent.discard(pair)
            self.world.later(self._next_beat(sender) - self.world.now, self._heard, sender, receiver, False)
        else:
            last = self._local(node, self._last_beat(sender))
            if sender in node.detector.peers and last > node.detector.peers[sender].last:
                node.detector = node.detector.hear(sender, last)
            self.silent.add(pair)
            self._judge_in(receiver, self.suspect_s + 0.001)

    def _heard(self, sender: str, receiver: str, again: bool) -> None:
        node = self.cluster.nodes[receiver]
        if not self.audible(sender, receiver) or not node.awake:
            return
        node.detector = node.detector.hear(sender, node.clock.now())
        node.judge()
        if again:
            self._judge_in(receiver, self.suspect_s + 0.001)

    # ---- message by message

    def _loop(self, sender: str, receiver: str) -> None:
        pair = (sender, receiver)
        if pair not in self.loops:
            self.loops.add(pair)
            self.silent.discard(pair)
            self.world.later(self._next_beat(sender) - self.world.now, self._message, sender, receiver)

    def _message(self, sender: str, receiver: str) -> None:
        pair = (sender, receiver)
        if receiver not in self.listeners[sender] or not self._by_message(sender, receiver):
            self.loops.discard(pair)
            self._compare(sender, receiver)
            if receiver in self.listeners[sender] and pair not in self.silent:
                self.world.later(self._next_beat(sender) - self.world.now, self._heard, sender, receiver, False)
            return
        lossy = self.cluster.net.lossy
        share = max(lossy.get(sender, 0.0), lossy.get(receiver, 0.0))
        if share == 0.0 or self.world.chance("beats").random() >= share:
            self._heard(sender, receiver, True)
        self.world.later(self._next_beat(sender) - self.world.now, self._message, sender, receiver)

    # ---- when beats come

    def _judge_in(self, receiver: str, delay: float) -> None:
        self.world.later(delay, self.cluster.nodes[receiver].judge)

    def _last_beat(self, sender: str) -> float:
        phase = self.cluster.nodes[sender].beat_phase * self.beat_s + LAG_S
        return floor((self.world.now - phase) / self.beat_s) * self.beat_s + phase

    def _next_beat(self, sender: str) -> float:
        beat = self._last_beat(sender) + self.beat_s
        return beat if beat > self.world.now + 1e-6 else beat + self.beat_s

    def _local(self, node: "Node", true: float) -> float:
        return node.clock.now() - (self.world.now - true) * node.clock.rate
