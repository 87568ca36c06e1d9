"""What a query of Prometheus asks for: metrics, the labels that it matches, and those that it keeps.

No parser of all of PromQL, which promtool is; enough to hold queries against what a server exports.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

FROM_SCRAPE = {"instance", "job"}  # labels that Prometheus adds
_SELECTOR = re.compile(r"(?:(quantkit:\w+)|\b(up))(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
Exported = dict[str, dict[str, set[str]]]  # sample name -> label -> its values


@dataclass(frozen=True)
class Selector:
    """`quantkit:x{a="1"}` of a query."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]  # label, operator, value

    def fault(self, exported: Exported) -> str | None:
        """What is wrong with it; None where a server has what it asks for."""
        if self.metric == "up":
            return None
        if self.metric not in exported:
            return f"no metric {self.metric}"
        labels = exported[self.metric]
        for label, operator, value in self.matchers:
            if label not in labels:
                return f"{self.metric} has no label {label}"
            if operator == "=" and value not in labels[label]:
                return f"{self.metric} never has {label}={value}"
            if operator == "=~" and "$" not in value and not any(re.fullmatch(value, one) for one in labels[label]):
                return f"{self.metric} never has a {label} like {value}"
        return None


def selectors(query: str) -> list[Selector]:
    found = []
    for own, up, inside in _SELECTOR.findall(query):
        matchers = tuple(_MATCHER.findall(inside))
        assert inside.strip() == "" or "".join(f'{a}{b}"{c}"' for a, b, c in matchers) == re.sub(r",?\s+|,", "", inside)
        found.append(Selector(own or up, matchers))
    return found


def labels_of(query: str, exported: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Labels that a result has: those that every `by` keeps, else those of all metrics in it."""
    kept = [{label.strip() for label in one.split(",")} - {"le"} for one in _BY.findall(query)]
    asked = [{*exported.get(one.metric, {}), *FROM_SCRAPE} for one in selectors(query)]
    return set.intersection(*(kept or asked))


def exported_by(text: str) -> Exported:
    """Of the text that a server gives at /metrics."""
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found
