"""Source files from the network: fetched with a few tries, and checked before they get their names."""

import os
import time

import requests
from tqdm import tqdm

from nanoheads.common import UserError, opened_anew


def download(file, path, wrong, tries=3):
    """Fetch file.url to `path` with progress and retries; only a checked file gets the name. UserError.

    wrong(path, file): what is wrong with its content, in a few words; "": nothing.
    """
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in reversed(range(tries)):
            try:
                receive(file.url, temp)
                break
            except requests.RequestException as error:
                if not left or error.response is not None and error.response.status_code < 500:
                    raise
                time.sleep(2)  # no connection, one that was cut off, or a fault of the server
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


def receive(url, temp):
    """Write the content of a URL into `temp`. Raises requests.RequestException, also where it was cut off."""
    headers = {"User-Agent": "nanoHeads/1.0", "Accept-Encoding": "identity"}  # its length is the file's own
    with requests.get(url, stream=True, timeout=30, headers=headers) as reply:
        reply.raise_for_status()
        size = int(reply.headers.get("Content-Length") or 0)
        bar = tqdm(total=size or None, unit="B", unit_scale=True, desc=url.rpartition("/")[2])
        with opened_anew(temp) as out, bar:
            for block in reply.iter_content(1 << 16):
                bar.update(out.write(block))
    came = temp.stat().st_size
    if size and came != size and "Content-Encoding" not in reply.headers:
        raise requests.ConnectionError(f"{came:,} of {size:,} bytes came")
