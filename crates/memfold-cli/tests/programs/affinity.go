package main

// #include <stdlib.h>
// static char *make(size_t len) {
//     volatile unsigned long *p = malloc(len);
//     for (size_t i = 0; i < len / 8; i++) p[i] = i * 0x9e3779b97f4a7c15ul >> 20;
//     return (char *)p;
// }
// static void touch(volatile char *p, size_t len) {
//     static unsigned long state = 1;
//     for (int i = 0; i < 50; i++) {
//         state = state * 6364136223846793005ul + 1442695040888963407ul;
//         p[(state >> 20) % len]++;
//     }
// }
import "C"
import (
	"fmt"
	"os"
	"runtime"
	"strings"
)

func allowed() string {
	text, _ := os.ReadFile("/proc/thread-self/status")
	_, after, _ := strings.Cut(string(text), "Cpus_allowed:\t")
	line, _, _ := strings.Cut(after, "\n")
	return line
}

func main() {
	runtime.LockOSThread()
	before := allowed()
	data := C.make(64 << 20)
	for i := 0; i < 2000; i++ {
		C.touch(data, 64<<20)
		if now := allowed(); now != before {
			fmt.Println("kept on", now)
			return
		}
	}
	fmt.Println("right")
}
