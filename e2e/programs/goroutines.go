package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"encoding/json"
	"sort"
)

func main() {
	if len(os.Args) > 1 { fmt.Println("child", os.Args[1]); return }
	c := make(chan os.Signal, 100)
	signal.Notify(c, syscall.SIGUSR1)
	var wg sync.WaitGroup
	m := map[string][]int{}
	var mu sync.Mutex
	for i := 0; i < 50; i++ {
		wg.Add(1)
		go func(i int) {
			defer wg.Done()
			for j := 0; j < 2000; j++ {
				b, _ := json.Marshal([]int{i, j, i * j})
				var back []int
				json.Unmarshal(b, &back)
				mu.Lock()
				m[fmt.Sprint(back[2]%5000)] = append(m[fmt.Sprint(back[2]%5000)], make([]int, 100)...)
				mu.Unlock()
				if j%500 == 0 { syscall.Kill(os.Getpid(), syscall.SIGUSR1); runtime.GC() }
			}
		}(i)
	}
	wg.Wait()
	keys := []string{}
	n := 0
	for k, v := range m { keys = append(keys, k); n += len(v) }
	sort.Strings(keys)
	fmt.Println(len(keys), n, len(c) > 0, runtime.NumCPU())
	func() { defer func() { fmt.Println("recovered", recover() != nil) }(); var p *int; *p = 1 }()
	e, _ := os.Executable()
	out, err := exec.Command(e, "x").Output()
	fmt.Println(string(out), err)
	out, err = exec.Command("/bin/echo", "dyn").Output()
	fmt.Println(string(out), err)
}
