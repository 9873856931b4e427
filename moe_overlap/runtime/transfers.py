"""megatron-core's pipeline transfers, with a span for every send and receive."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from moe_overlap.runtime.spans import SpanRecorder


class RecordedTransfers(P2PCommunicator):
    """P2PCommunicator that names its transfers `send.S0>S1`, `receive.S0>S1`, with `.backward` for gradients."""

    def __init__(self, pp_group: Any, config: Any, recorder: SpanRecorder) -> None:
        super().__init__(pp_group, config)
        self._recorder = recorder
        stage, stages = pp_group.rank(), pp_group.size()
        before, after = (stage - 1) % stages, (stage + 1) % stages
        self._into, self._out = f"S{before}>S{stage}", f"S{stage}>S{after}"

    def _communicate(self, **transfer: Any) -> Any:
        names = [
            name
            for name, wanted in (
                (f"send.{self._out}", transfer["tensor_send_next"] is not None),
                (f"send.{self._into}.backward", transfer["tensor_send_prev"] is not None),
                (f"receive.{self._into}", transfer["recv_prev"]),
                (f"receive.{self._out}.backward", transfer["recv_next"]),
            )
            if wanted
        ]
        if not names:
            return super()._communicate(**transfer)
        blocking = transfer.get("wait_on_reqs", True)
        if blocking:
            self._recorder.end()
        opened = [self._recorder.background(name, "pp") for name in names]
        received_previous, received_next, requests = super()._communicate(**transfer)
        if blocking or not requests:
            for span in opened:
                self._recorder.finish_background(span)
            return received_previous, received_next, requests
        pending = _PendingSpans(self._recorder, opened, len(requests))
        if isinstance(requests, dict):
            requests = {key: _RecordedRequest(request, pending) for key, request in requests.items()}
        else:
            requests = [_RecordedRequest(request, pending) for request in requests]
        return received_previous, received_next, requests


class _PendingSpans:
    """Spans of one exchange; they end when its last request has been waited for."""

    def __init__(self, recorder: SpanRecorder, opened: list[Any], requests: int) -> None:
        self.recorder, self.opened, self.waiting = recorder, opened, requests

    def one_finished(self) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            for span in self.opened:
                self.recorder.finish_background(span)


class _RecordedRequest:
    def __init__(self, request: Any, pending: _PendingSpans) -> None:
        self._request, self._pending = request, pending

    def wait(self) -> None:
        self._pending.recorder.end()
        self._request.wait()
        self._pending.one_finished()
