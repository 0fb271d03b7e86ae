"""Passwords and certificates, on real servers."""

import asyncio
import datetime as dt
import ipaddress
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from store_kit import Wire, watching

from chaos.etcd import LocalCluster
from elasticrl.store import Absent, Put, Store, StoreRefused, StoreSettings, StoreUnavailable, Tls, open_store
from elasticrl.store.embedded import find_binary


def connect(client: str, etcd: LocalCluster, **settings: object) -> Store:
    plain = {"client": client, "endpoints": etcd.endpoints, "namespace": "/elasticrl/safe/"}
    return open_store(StoreSettings(**{**plain, **settings}))  # type: ignore[arg-type]


def protect(endpoint: str) -> None:
    """Let root in, and `trainer` into /elasticrl/safe/ only."""
    etcdctl = str(Path(find_binary()).with_name("etcdctl"))
    for words in (
        "user add root:secret",
        "user grant-role root root",
        "user add trainer:hunter2",
        "role add safe",
        "role grant-permission safe --prefix=true readwrite /elasticrl/safe/",
        "user grant-role trainer safe",
        "auth enable",
    ):
        done = subprocess.run(
            [etcdctl, "--endpoints", endpoint, *words.split()],
            env={"ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=20,
        )
        # The role root exists on some versions before it is added by hand.
        assert done.returncode == 0, f"{words}: {done.stderr}"


async def test_a_user_is_let_in_kept_in_its_prefix_and_let_in_again_when_etcd_forgets_it(
    client: str, tmp_path: Path
) -> None:
    async with LocalCluster(tmp_path, members=1) as etcd:
        await asyncio.to_thread(protect, etcd.endpoints[0])
        async with connect(client, etcd, username="trainer", password="hunter2") as store:
            first = await store.put("n", b"0")
            lease = await store.grant(30)
            async with watching(store, "n", start=first) as watcher:
                await watcher.until(1)
                etcd.kill(0)  # its logins live in memory only
                await etcd.revive(0)
                await store.put("n", b"1")
                assert (await store.keepalive(lease.id)).held
                assert [value for _, value, _ in await watcher.until(2)] == [b"0", b"1"]
        async with (
            Wire(etcd.endpoints[0]) as wire,
            connect(client, etcd, endpoints=(wire.endpoint,), username="trainer", password="hunter2") as store,
        ):
            await store.get("n")  # so that there is a connection
            store._login.forget()
            wire.mute_answers = True
            attempt = asyncio.ensure_future(store.txn([Absent(key="x")], [Put(key="x", value=b"")]))
            await asyncio.wait_for(wire.lost.wait(), 5)
            wire.cut()  # the login is lost, the transaction has not been sent: so it is not ambiguous
            assert (await attempt).ok
        async with connect(client, etcd, username="trainer", password="wrong") as store:
            with pytest.raises(StoreRefused, match="invalid user ID or password"):
                await store.get("n")
        async with connect(client, etcd) as store:
            with pytest.raises(StoreRefused, match="user name is empty"):
                await store.put("n", b"2")
        async with connect(
            client, etcd, username="trainer", password="hunter2", namespace="/elasticrl/other/"
        ) as store:
            with pytest.raises(StoreRefused, match="permission denied"):
                await store.put("n", b"2")
            with pytest.raises(StoreRefused, match="permission denied"):
                async with watching(store, "n", start=1) as watcher:
                    await watcher.until(1, within_s=2)


async def test_a_username_for_a_server_without_users_is_said_and_otherwise_ignored(etcd: LocalCluster) -> None:
    said: list[str] = []

    def say(event: str, /, **_: object) -> None:
        said.append(event)

    settings = StoreSettings(endpoints=etcd.endpoints, username="trainer", password="hunter2")
    async with open_store(settings, say=say) as store:
        await store.get("n")
        await store.get("n")
    assert said == ["store.no_auth"]


async def test_users_that_are_switched_on_later_are_logged_in(tmp_path: Path) -> None:
    # Found by reading: a daemon that had once met an etcd without users asked for no login until it was restarted.
    async with LocalCluster(tmp_path, members=1) as etcd:
        async with connect("grpc", etcd, username="trainer", password="hunter2") as store:
            await store.put("n", b"0")
            await asyncio.to_thread(protect, etcd.endpoints[0])
            await store.put("n", b"1")
            assert [entry.value for entry in (await store.scan("")).entries] == [b"1"]
        async with connect("grpc", etcd) as store:
            with pytest.raises(StoreRefused, match="user name is empty"):
                await store.put("n", b"2")


class Authority:
    """A certificate authority with a certificate for the server and one for a client, as files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ca {folder.name}")])
        self._sign("ca", self._name, self._key, ca=True)
        for who in ("server", "client"):
            self._sign(
                who, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, who)]), ec.generate_private_key(ec.SECP256R1())
            )

    def pem(self, who: str) -> str:
        return str(self._folder / f"{who}.pem")

    def key(self, who: str) -> str:
        return str(self._folder / f"{who}.key")

    def _sign(self, who: str, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool = False) -> None:
        now = dt.datetime.now(dt.UTC)
        addresses = [x509.DNSName("etcd.example"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        Path(self.pem(who)).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        Path(self.key(who)).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


async def test_tls_is_used_and_a_server_of_another_authority_is_not_trusted(client: str, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    tls = Tls(ca=ours.pem("ca"))
    args = ("--cert-file", ours.pem("server"), "--key-file", ours.key("server"))
    async with LocalCluster(tmp_path, members=1, tls=tls, args=args) as etcd:
        assert etcd.endpoints[0].startswith("https://")
        async with connect(client, etcd, tls=tls) as store:
            start = await store.put("n", b"0")
            async with watching(store, "n", start=start) as watcher:
                await watcher.until(1)
        async with connect(client, etcd, tls=Tls(ca=other.pem("ca")), timeout_s=0.5) as store:
            with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                await store.get("n")
        async with connect(client, etcd, tls=Tls(ca=ours.pem("ca"), server_name="etcd.example")) as store:
            assert await store.get("n")
        async with connect(
            client, etcd, tls=Tls(ca=ours.pem("ca"), server_name="evil.example"), timeout_s=0.5
        ) as store:
            with pytest.raises(StoreUnavailable):
                await store.get("n")
        async with connect(client, etcd, tls=Tls(ca=str(tmp_path / "missing.pem"))) as store:
            with pytest.raises(StoreRefused, match=r"missing\.pem"):
                await store.get("n")


async def test_mutual_tls_lets_only_those_in_who_have_a_certificate(client: str, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    tls = Tls(ca=ours.pem("ca"), cert=ours.pem("client"), key=ours.key("client"))
    args = ("--cert-file", ours.pem("server"), "--key-file", ours.key("server"))
    args += ("--trusted-ca-file", ours.pem("ca"), "--client-cert-auth")
    async with LocalCluster(tmp_path, members=1, tls=tls, args=args) as etcd:
        async with connect(client, etcd, tls=tls) as store:
            await store.put("n", b"0")
            assert (await store.status()).ok
        for stranger in (
            Tls(ca=ours.pem("ca")),
            Tls(ca=ours.pem("ca"), cert=other.pem("client"), key=other.key("client")),
        ):
            async with connect(client, etcd, tls=stranger, timeout_s=0.5) as store:
                with pytest.raises(StoreUnavailable):
                    await store.get("n")


async def test_certificates_that_are_renewed_on_the_disk_are_read_again(tmp_path: Path) -> None:
    # Found by reading: at the first reconnect after they had run out, all nodes lost the store for good.
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    args = ("--cert-file", ours.pem("server"), "--key-file", ours.key("server"))
    args += ("--trusted-ca-file", ours.pem("ca"), "--client-cert-auth")
    good = Tls(ca=ours.pem("ca"), cert=ours.pem("client"), key=ours.key("client"))
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"

    def put(authority: Authority) -> None:
        for path, source in ((cert, authority.pem("client")), (key, authority.key("client"))):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(Path(source).read_bytes())
            fresh.replace(path)

    put(other)
    async with LocalCluster(tmp_path, members=1, tls=good, args=args) as etcd:
        tls = Tls(ca=ours.pem("ca"), cert=str(cert), key=str(key))
        async with connect("grpc", etcd, tls=tls, timeout_s=1.0) as store:
            with pytest.raises(StoreUnavailable):
                await store.get("n")
            put(ours)
            await store.put("n", b"1")
            assert await store.get("n")


async def test_etcd3_says_that_it_needs_a_ca_file() -> None:
    settings = StoreSettings(client="etcd3", endpoints=("https://127.0.0.1:1",))
    async with open_store(settings) as store:
        with pytest.raises(StoreRefused, match="needs a CA file"):
            await store.get("n")
