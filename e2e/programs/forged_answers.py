"""A process of one user answers in place of `memfold run` to a process that becomes another user.
Each must use the table of its own user, or none. Runs as root, as the program of a run."""
import array, os, re, signal, socket, sys, time

ATTACKER, VICTIM, ROUNDS = 65534, 1, 2
entries = (entry.split(b"=", 1) for entry in open("/proc/self/environ", "rb").read().split(b"\0") if b"=" in entry)
name, key = re.search(r"door=([^;,]+),([0-9a-f]{64})", dict(entries)[b"MEMFOLD_RUN"].decode()).groups()
ask, answer = bytes.fromhex(key)[:16], bytes.fromhex(key)[16:]
# The process has an engine.
memory = [bytearray(os.urandom(1 << 20)) for _ in range(24)]
run = os.getppid()


def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def forge(ready):
    """Gets the table of its user, and sends it to each socket with a name until it is ended."""
    become(ATTACKER)
    asking, (own, given) = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(10)
    asking.sendmsg([ask], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [given.fileno()]))], 0, "\0" + name)
    files = array.array("i")
    for level, kind, data in own.recvmsg(20, 256)[1]:
        if kind == socket.SCM_RIGHTS:
            files.frombytes(data[:8])
    os.write(ready, b"%d" % os.fstat(files[0]).st_ino)
    forged = answer + (4242).to_bytes(4, "little")
    while True:
        for other in re.findall(rb" @([0-9a-f]{5})\n", open("/proc/net/unix", "rb").read()):
            try:
                asking.sendmsg([forged], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], socket.MSG_DONTWAIT, b"\0" + other)
            except OSError:
                pass


reader, writer = os.pipe()
attacker = os.fork()
if attacker == 0:
    forge(writer)
table = int(os.read(reader, 100))
wrong = 0
for _ in range(ROUNDS):
    # The process asks while `memfold run` can't answer.
    os.kill(run, signal.SIGSTOP)
    victim = os.fork()
    if victim == 0:
        become(VICTIM)
        maps = open("/proc/self/maps").read()
        os._exit(any(int(line.split()[4]) == table for line in maps.splitlines()))
    time.sleep(2)
    os.kill(run, signal.SIGCONT)
    wrong += os.waitpid(victim, 0)[1] != 0
os.kill(attacker, signal.SIGKILL)
os.waitpid(attacker, 0)
print(f"{wrong} of {ROUNDS} use the table of the attacker" if wrong else "right")
sys.exit(wrong)
