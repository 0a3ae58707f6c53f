// A library with Go's runtime, which starts threads in the library's constructor. A goroutine keeps a
// little data, and checks and replaces it.
package main

import "C"
import (
	"fmt"
	"os"
	"time"
)

var turns int

func init() {
	go func() {
		blocks := make([][]byte, 64)
		for turn := 0; ; turn++ {
			block := blocks[turn%len(blocks)]
			for at := 0; at < len(block); at += 64 {
				if block[at] != byte(turn-len(blocks)) {
					fmt.Fprintln(os.Stderr, "the goroutine found a wrong byte")
					os.Exit(99)
				}
			}
			block = make([]byte, 200<<10)
			for at := range block {
				block[at] = byte(turn)
			}
			blocks[turn%len(blocks)], turns = block, turn
			time.Sleep(500 * time.Microsecond)
		}
	}()
}

//export Turns
func Turns() int { return turns }

func main() {}
