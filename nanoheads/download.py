"""Source files from the network: fetched with a few tries, and checked before they get their names."""

import os
import time
from contextlib import suppress
from pathlib import Path

import requests
from tqdm import tqdm

from nanoheads.common import UserError
from nanoheads.locks import remove_abandoned, temporary


def download(file, path, wrong, tries=3):
    """Fetch file.url to `path` with progress and retries; only a checked file gets the name. UserError.

    wrong(path, file): what is wrong with its content, in a few words; "": nothing.
    """
    temp = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent, path.name)
        temp = temporary(path)
        for left in reversed(range(tries)):
            try:
                receive(file.url, temp)
                break
            except requests.RequestException as error:
                if not left or error.response is not None and error.response.status_code < 500:
                    raise
                time.sleep(2)  # no connection, one that was cut off, or a fault of the server
        if complaint := wrong(Path(temp.name), file):
            raise UserError(f"{file.url}: the download {complaint}; put {file.names[0]} from elsewhere "
                            f"into the folder NANOHEADS_DATA")
        temp.close()
        os.replace(temp.name, path)
        return path
    except requests.RequestException as error:
        why = str(error) if len(str(error)) < 80 else type(error).__name__  # some are a paragraph
        why = why if error.response is None else f"HTTP {error.response.status_code}"
        raise UserError(f"{file.url}: the download failed ({why}); try later, or put {file.names[0]} "
                        f"into the folder NANOHEADS_DATA by hand") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); make room") from None
    finally:
        if temp:
            with suppress(OSError):  # a full disk, which was reported
                temp.close()
            Path(temp.name).unlink(missing_ok=True)


def receive(url, out):
    """Write the content of a URL into an open file, anew. Raises requests.RequestException, also where it was
    cut off.
    """
    out.seek(0)
    out.truncate()
    headers = {"User-Agent": "nanoHeads/1.0", "Accept-Encoding": "identity"}  # its length is the file's own
    with requests.get(url, stream=True, timeout=30, headers=headers) as reply:
        reply.raise_for_status()
        size = int(reply.headers.get("Content-Length") or 0)
        with tqdm(total=size or None, unit="B", unit_scale=True, desc=url.rpartition("/")[2]) as bar:
            for block in reply.iter_content(1 << 16):
                bar.update(out.write(block))
    out.flush()
    came = out.tell()
    if size and came != size and "Content-Encoding" not in reply.headers:
        raise requests.ConnectionError(f"{came:,} of {size:,} bytes came")
