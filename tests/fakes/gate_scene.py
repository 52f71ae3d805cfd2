"""A gate with engines, tenants and a clock that a test moves."""

from __future__ import annotations

from pagefleet_protocol.tenants import Tenant
from pagefleet_router.admission.gate import Gate, GateLimits
from pagefleet_router.admission.room import Room
from pagefleet_router.errors import Refusal
from pagefleet_router.request_view import ANONYMOUS, RequestView


class Request:
    """Notes what it is told; more than one answer fails."""

    def __init__(self, scene: GateScene, view: RequestView, num_body_bytes: int = 0) -> None:
        self.view = view
        self.num_body_bytes = num_body_bytes
        self.is_in = self.is_over = False
        self.refusal: Refusal | None = None
        self._scene = scene

    @property
    def is_waiting(self) -> bool:
        return not (self.is_in or self.is_over or self.refusal)

    def admitted(self) -> None:
        assert self.is_waiting
        self.is_in = True
        self._scene.order.append(self)

    def turned_away(self, refusal: Refusal) -> None:
        assert self.is_waiting
        self.refusal = refusal
        self._scene.gate.left(self)  # as an exchange does at its end, whatever that is


class GateScene:
    """Also the `Engines` of its gate."""

    def __init__(
        self,
        capacity: int = 1,
        tenants: tuple[Tenant, ...] = (),
        limits: GateLimits | None = None,
        num_engines: int = 1,
    ) -> None:
        self.now = 1000.0
        self.rooms = {"m": Room(num_engines, capacity)}
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.order: list[Request] = []
        """Those that got in, in order."""
        self.limits = limits or GateLimits(1000, 60.0, 0.0, 10**9)
        self.gate = Gate(self, self.limits, self.tenants.get, lambda: self.now, lambda: 0.0)

    def room(self, model: str) -> Room:
        """See Engines."""
        return self.rooms.get(model, Room())

    def come(
        self,
        tenant: str = ANONYMOUS,
        num_tokens: int = 100,
        max_tokens: int | None = None,
        priority: int = 0,
        num_bytes: int = 0,
    ) -> Request:
        """Let a request come to the gate."""
        view = RequestView("m", num_tokens=num_tokens, max_tokens=max_tokens, tenant=tenant, priority=priority)
        request = Request(self, view, num_bytes)
        try:
            if self.gate.enter(request):
                request.admitted()
        except Refusal as refusal:
            request.turned_away(refusal)
        return request

    def end(self, request: Request, num_tokens: int | None = None) -> None:
        """End a request that is in, with what it took: by default as much as expected."""
        assert request.is_in
        assert not request.is_over
        request.is_over = True
        view = request.view
        self.gate.ended(request, view.num_tokens + (view.max_tokens or 0) if num_tokens is None else num_tokens)

    def leave(self, request: Request) -> None:
        """Let the client of a waiting request go."""
        assert request.is_waiting
        request.is_over = True
        self.gate.left(request)

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.gate.check(self.now)

    def set_room(self, num_engines: int, capacity: int, num_foreign: int = 0) -> None:
        """Change the engines."""
        self.rooms["m"] = Room(num_engines, capacity, num_foreign)
        self.gate.engines_changed()

    def next_ends(self) -> Request:
        """End the oldest request that is in; returns it."""
        request = next(one for one in self.order if one.is_in and not one.is_over)
        self.end(request)
        return request
