"""Does at each site what a server does elsewhere: the same outer step, on the submissions of all sites."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from onstep.diloco.background import in_thread
from onstep.diloco.codec.body import Body, read_body
from onstep.diloco.codec.formats import check_encoded, check_values, encoded_specs
from onstep.diloco.fragments import assign
from onstep.diloco.group.sites import Meeting, SiteLostError, Sites
from onstep.diloco.outer import OuterFactory
from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Beat,
    Heartbeat,
    Left,
    ParameterSpec,
    Ready,
    Register,
    Registered,
    Reply,
    Request,
    Settings,
    Submit,
    fingerprint,
)
from onstep.diloco.protocol.settings import check_settings
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment, Version
from onstep.errors import CheckpointError, ConfigError, text_of

_EXACT = "fp32"
"""Codec of versions, which no line carries."""


class GroupClient:
    """Answers one site's requests as a server would that all sites have submitted to; the outer state is at each site.

    Registrations and submissions are collective over the sites: each is gathered from all of them. After every outer
    step, the sites compare the hash of the parameters.

    Args:
        meeting: of the sites.
        settings: the same at all sites.
        codec: of submissions, the same at all sites.
        factory: makes the outer optimizer.
        specs: of the model's parameters.
        parameters: the first values, of which those of site 0 count; not used with a `state`.
        state: of an earlier process, to continue from.
    """

    def __init__(
        self,
        meeting: Meeting,
        settings: Settings,
        codec: str,
        factory: OuterFactory,
        specs: Sequence[ParameterSpec],
        parameters: Mapping[str, Tensor],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._meeting, self._settings, self._codec, self._factory = meeting, settings, codec, factory
        self._specs, self._run_id, self._parameters = tuple(specs), secrets.token_hex(8), parameters
        self._fragments: list[Fragment] = []
        self._is_ahead = False
        """Whether an outer step was begun that has not been compared."""
        self._refusal = "" if state is None else self._refusal_of(state)

    def _make(self, parameters: Mapping[str, Tensor]) -> None:
        parts = assign(self._specs, self._settings.num_fragments)
        self._fragments = [Fragment(part, parameters, self._factory, _EXACT) for part in parts]

    def _refusal_of(self, state: Mapping[str, Any]) -> str:
        """Why this site cannot continue from a state, for all sites to hear; "" once it has."""
        self._run_id = state["run_id"]
        parts = [{name: one.shape for name, one in saved["masters"].items()} for saved in state["fragments"]]
        try:
            wanted = assign(self._specs, self._settings.num_fragments)
            if parts != [{spec.name: torch.Size(spec.shape) for spec in part} for part in wanted]:
                return (
                    f"its checkpoint was saved with a different model or other fragments than the {len(wanted)} here; "
                    f"continue with the model and the num_fragments={len(parts)} of the checkpoint."
                )
            self._make({name: one for saved in state["fragments"] for name, one in saved["masters"].items()})
            for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
                fragment.load_state_dict(saved)
        except (CheckpointError, ConfigError) as error:
            return text_of(error)
        return ""

    def send(self, request: Request, body: bytes | bytearray = b"") -> tuple[Reply, Any]:
        """The reply and its tensors.

        Raises:
            SiteLostError: if another site has ended.
            ConfigError: for sites that were started differently.
        """
        if isinstance(request, Register):
            return in_thread(lambda: self._register(request)).result(), b""
        if isinstance(request, Submit):
            return self._submit(request, body), b""
        if isinstance(request, Await):
            return self._newest(request.fragment)
        if isinstance(request, Heartbeat):
            return Beat(self._versions, self._meeting.size), b""
        return Left(), b""

    def close(self) -> None:
        """Let go of a group that was made from a URL, and leave another to its owner."""
        self._meeting.close()

    def state_dict(self) -> dict[str, Any]:
        """The outer state; shares the memory of its tensors.

        Raises:
            SiteLostError: after a step that other sites have perhaps not taken.
        """
        self._check_is_not_ahead()
        return {"run_id": self._run_id, "fragments": [one.state_dict(one.newest) for one in self._fragments]}

    def _check_is_not_ahead(self) -> None:
        if self._is_ahead:
            raise SiteLostError(
                "the last outer step was not compared with the other sites, so it is in no checkpoint; start all sites "
                "again, which continue from their checkpoints."
            )

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(one.newest.number for one in self._fragments)

    def _register(self, request: Register) -> Registered:
        meeting = self._meeting
        everyone = meeting.gather_json(self._facts())
        for site, facts in enumerate(everyone):
            if facts["refusal"]:
                raise ConfigError(f"site {site} cannot resume: {facts['refusal']}")
        for site, facts in enumerate(everyone):
            differs = next((key for key, value in facts.items() if value != everyone[0].get(key)), None)
            if differs is not None and differs != "run":
                raise ConfigError(
                    f"the sites must be started alike, but {differs} is {everyone[0].get(differs)!r} at site 0 and "
                    f"{facts[differs]!r} at site {site}; give all the same model, settings, and checkpoints of the "
                    f"same round."
                )
        self._run_id = everyone[0]["run"]
        if not self._fragments:
            for spec in self._specs:
                meeting.share(self._parameters[spec.name])
            self._make(self._parameters)
        self._parameters = {}
        versions = self._versions
        return Registered(
            self._run_id,
            self._settings,
            versions,
            slot=meeting.site,
            num_slots=meeting.size,
            step=request.step,
            next_sequences=versions,
            slot_steps=request.step,
        )

    def _facts(self) -> dict[str, Any]:
        """What must be the same at all sites, but for the run; and why this one cannot resume."""
        outer = self._factory([torch.zeros(1)])
        rates = {name: value for name, value in outer.defaults.items() if isinstance(value, bool | int | float)}
        versions = [[one.newest.number, one.newest.digest] for one in self._fragments]
        return {
            **asdict(self._settings),
            "codec": self._codec,
            "the outer optimizer": {"name": type(outer).__name__, **rates},
            "the model": fingerprint(self._specs),
            "the round of the checkpoint": versions or None,
            "run": self._run_id,
            "refusal": self._refusal,
        }

    def _submit(self, submit: Submit, body: bytes | bytearray) -> Accepted:
        """Take the outer step that all sites take with this submission, unless they have."""
        fragment = self._fragments[submit.fragment]
        if submit.sequence < fragment.newest.number:
            return Accepted(fragment.newest.number, is_repeat=True)
        self._check_is_not_ahead()
        round_of_all = self._meeting.gather(torch.tensor([submit.fragment, submit.sequence, len(body), submit.tokens]))
        if any(not torch.equal(one[:3], round_of_all[0][:3]) for one in round_of_all):
            raise ConfigError(
                f"the sites are at different rounds (fragment and round {[one[:2].tolist() for one in round_of_all]}); "
                f"each must take as many steps as the others."
            )
        bodies = self._meeting.gather(torch.frombuffer(body, dtype=torch.uint8))
        contributions = [
            Contribution(self._read(one, fragment), self._codec, float(facts[3]))
            for one, facts in zip(bodies, round_of_all, strict=True)
        ]
        self._is_ahead = True
        version = fragment.step(contributions)
        self._compare(version)
        fragment.newest, self._is_ahead = version, False
        return Accepted(fragment.newest.number)

    def _read(self, body: Tensor, fragment: Fragment) -> dict[str, Tensor]:
        encoded = read_body(body.numpy().data)
        check_encoded(encoded, fragment.specs, self._codec)
        check_values(encoded, fragment.specs, self._codec)
        return encoded

    def _compare(self, version: Version) -> None:
        """Check that the parameters of a version have the same hash at all sites."""
        digests = self._meeting.gather(torch.frombuffer(bytearray.fromhex(version.digest), dtype=torch.uint8))
        others = [site for site, one in enumerate(digests) if not torch.equal(one, digests[0])]
        if others:
            raise SiteLostError(
                f"site {others[0]} has other parameters than site 0 after the same outer step to version "
                f"{version.number}; check the memory of both machines, and start all sites again with the same torch."
            )

    def _newest(self, index: int) -> tuple[Ready, bytearray]:
        fragment = self._fragments[index]
        body = Body(encoded_specs(fragment.specs, _EXACT))
        for name, tensor in fragment.newest.parameters.items():
            body.tensors[name].copy_(tensor)
        number, size = fragment.newest.number, self._meeting.size
        return Ready(index, number, "full", _EXACT, fragment.newest.digest, size if number else 0), body.memory


def join_sites(
    sites: Sites,
    specs: Sequence[ParameterSpec],
    parameters: Mapping[str, Tensor],
    *,
    codec: str,
    sync_every: int,
    num_fragments: int,
    timeout: float,
    state: Mapping[str, Any] | None,
) -> GroupClient:
    """Meet the other sites; see `DiLoCoWorker`, `Sites` and `GroupClient` for the arguments.

    Raises:
        ConfigError: for settings out of range, or a group that cannot be joined.
        SiteLostError: if the others do not come.
    """
    meeting = sites.join(timeout)
    settings = Settings(
        num_workers=meeting.size,
        min_workers=meeting.size,
        sync_every=sync_every,
        num_fragments=num_fragments,
        overlap_steps=sites.overlap_steps,
        heartbeat_timeout=0.0,
    )
    check_settings(settings)
    return GroupClient(meeting, settings, codec, sites.outer_optimizer_factory, specs, parameters, state)
