import asyncio, concurrent.futures as cf, multiprocessing as mp, os, signal, subprocess
rang = 0
def ring(s, f):
    global rang; rang += 1
def work(i): return sum(range(20000)) + i
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
with cf.ThreadPoolExecutor(8) as e: print(sum(e.map(work, range(100))))
while not rang: signal.pause()
signal.setitimer(signal.ITIMER_REAL, 0)
print(subprocess.check_output('ls / | wc -l', shell=True))
with mp.get_context('fork').Pool(2) as p: print(p.map(work, range(10)))
async def one(i):
    await asyncio.sleep(0.001 * i)
    return i
async def main():
    p = await asyncio.create_subprocess_exec('echo', 'q', stdout=asyncio.subprocess.PIPE)
    print(await p.communicate(), await asyncio.gather(*[one(i) for i in range(10)]))
asyncio.run(main())
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigpending(), signal.sigtimedwait({signal.SIGUSR1}, 5).si_signo)
