"""When a request is done, and what of its text is kept."""

from splash_jax.models.tokenizer import Detokenizer
from splash_jax.scheduler import Request


class Ending:
    """Watches one request's tokens for stop ids, stop strings and its length limit."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self.request, self.detokenizer = request, detokenizer
        self.text = ""

    def add(self, token: int) -> None:
        """Take one more token; sets the request's finish reason when it is the last."""
        request, params = self.request, self.request.params
        request.output_ids.append(token)
        early = request.known - request.prompt_only < params.min_tokens
        if token in request.stop_ids and not early:
            request.finish_reason = "stop"
            request.stop_reason = token if token in (params.stop_token_ids or ()) else None
            if self.detokenizer is not None and params.include_stop_str_in_output:
                self.text += self.detokenizer.add([token])
        elif self.detokenizer is not None:
            before = len(self.text)
            self.text += self.detokenizer.add([token])
            self._stop_string(before, early)
        if request.finish_reason is None and request.known >= request.max_total:
            request.finish_reason = "length"
        if request.finish_reason is not None and not isinstance(request.stop_reason, str) and self.detokenizer:
            self.text += self.detokenizer.flush()

    def _stop_string(self, before: int, early: bool) -> None:
        """End at the first stop string that the newest text completes."""
        params = self.request.params
        if early or not params.stop_strings:
            return
        longest = max(len(stop) for stop in params.stop_strings)
        start = max(0, before - longest + 1)
        found = [(self.text.find(stop, start), stop) for stop in params.stop_strings]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self.text = self.text[: at + len(stop) if params.include_stop_str_in_output else at]
            self.request.finish_reason, self.request.stop_reason = "stop", stop
