"""prometheus-adapter's external rules: the text that replaces `<<.LabelMatchers>>` in a query.

Source: kubernetes-sigs/prometheus-adapter pkg/naming/metrics_query.go.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class SelectorError(ValueError):
    """The metric selector uses an operator that the adapter refuses."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of a label selector: `label operator (values)`."""

    label: str
    operator: str
    values: tuple[str, ...] = ()


def label_matchers(
    selector: Sequence[Requirement],
    *,
    namespace: str | None = None,
    namespace_label: str = "namespace",
) -> str:
    """The HPA's metric selector, then its namespace (None: `resources.namespaced: false`)."""
    parts = [_matcher(requirement) for requirement in selector]
    if namespace:
        parts.append(f'{namespace_label}="{namespace}"')
    return ",".join(parts)


def _matcher(requirement: Requirement) -> str:
    label, joined = requirement.label, "|".join(requirement.values)
    one = len(requirement.values) == 1
    match requirement.operator.lower():
        case "=" | "==" | "in" if one:
            return f'{label}="{joined}"'
        case "=" | "==" | "in" if requirement.values:
            return f'{label}=~"{joined}"'
        case "!=" | "notin" if one:
            return f'{label}!="{joined}"'
        case "!=" | "notin" if requirement.values:
            return f'{label}!~"{joined}"'
        case "exists":
            return f'{label}!=""'
        case "!" | "doesnotexist":
            return f'{label}=""'
    raise SelectorError(
        f"{requirement.operator!r} on label {label!r}: the adapter knows In, NotIn, Exists, "
        "DoesNotExist and equality"
    )
