"""Find the answer that a model wrote, as `reasoning_gym.utils.extract_answer` finds it, but in linear time."""

OPENING, CLOSING = "<answer>", "</answer>"


def extracted(text: str) -> str | None:
    """Return the text of the last `<answer>...</answer>`, without white space around it. None: there is none.

    The library's regular expression takes quadratic time for a text with many tags that are not closed.
    """
    found, at = None, 0
    while (begin := text.find(OPENING, at)) >= 0:
        begin += len(OPENING)
        end = text.find(CLOSING, begin)
        if end < 0:
            break
        found, at = (begin, end), end + len(CLOSING)
    return None if found is None else text[found[0] : found[1]].strip()
