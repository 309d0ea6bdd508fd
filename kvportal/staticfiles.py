"""WhiteNoise under ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO

from django.http import FileResponse, HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from whitenoise.middleware import WhiteNoiseMiddleware

_CHUNK = 64 * 1024


class StaticFilesMiddleware(WhiteNoiseMiddleware):
    """Serves the files as WhiteNoise does, but as an asynchronous stream.

    WhiteNoise answers with an ordinary file response; under ASGI Django warns about each of those
    and reads it whole before the first byte goes out.
    """

    @staticmethod
    def serve(static_file: object, request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = WhiteNoiseMiddleware.serve(static_file, request)
        file = response.file_to_stream if isinstance(response, FileResponse) else None
        if file is None or not hasattr(request, "scope"):
            return response
        answer = StreamingHttpResponse(_chunks(file), status=response.status_code)
        answer.headers = response.headers
        return answer


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    """Reads on the loop: the files are small and in the page cache."""
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk
