"""Source files from the network: retries, downloads that go on where they were cut off, checks."""

import os

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError
from tqdm import tqdm
from urllib3.util import Retry

from nanoheads.common import UserError


def download(file, path, wrong, tries=3):
    """Fetch file.url to `path` with progress and retries; only a checked file gets the name. UserError.

    wrong(path, file): what is wrong with its content, in a few words; "": nothing.
    """
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with session_of(tries) as session:
            for left in reversed(range(tries)):
                try:
                    receive(session, file.url, temp)
                    break
                except ChunkedEncodingError:  # it was cut off: go on from there
                    if not left:
                        raise
        if complaint := wrong(temp, file):
            raise UserError(f"{file.url}: the download {complaint}; put {file.names[0]} from elsewhere "
                            f"into the folder NANOHEADS_DATA")
        os.replace(temp, path)
        return path
    except requests.RequestException as error:
        why = str(error) if len(str(error)) < 80 else type(error).__name__  # some are a paragraph
        why = why if error.response is None else f"HTTP {error.response.status_code}"
        raise UserError(f"{file.url}: the download failed ({why}); try later, or put {file.names[0]} "
                        f"into the folder NANOHEADS_DATA by hand") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); make room") from None
    finally:
        temp.unlink(missing_ok=True)


def session_of(tries):
    """A session that sends a request so many times while there is no connection, or a server error."""
    session = requests.Session()
    # identity: a compressed transfer would hide the real length
    session.headers.update({"User-Agent": "nanoHeads/1.0", "Accept-Encoding": "identity"})
    retry = Retry(total=tries - 1, backoff_factor=2, status_forcelist=range(500, 600), raise_on_status=False,
                  respect_retry_after_header=False)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


def receive(session, url, temp):
    """Append to `temp` what it lacks of the content of a URL. Raises ChunkedEncodingError: it was cut off."""
    have = temp.stat().st_size if temp.is_file() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with session.get(url, stream=True, timeout=30, headers=headers) as reply:
        reply.raise_for_status()
        have = have if reply.status_code == 206 else 0  # else the server begins anew
        size = int(reply.headers.get("Content-Length") or 0)
        bar = tqdm(total=have + size or None, initial=have, unit="B", unit_scale=True,
                   desc=url.rpartition("/")[2])
        try:
            with open(temp, "ab" if have else "wb") as out, bar:
                for block in reply.iter_content(1 << 14):
                    bar.update(out.write(block))
        except requests.ConnectionError as error:
            raise ChunkedEncodingError(error) from None
        came = temp.stat().st_size - have
        if size and came != size and "Content-Encoding" not in reply.headers:
            raise ChunkedEncodingError(f"{came:,} of {size:,} bytes came")
