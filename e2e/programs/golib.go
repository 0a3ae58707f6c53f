// A library with Go's runtime, which starts threads in the library's constructor. A goroutine keeps a
// little data, and checks and replaces it. On demand it checks what it has not touched for long.
package main

import "C"
import (
	"fmt"
	"os"
	"time"
)

var turns int
var asked, answers = make(chan bool), make(chan int)

func init() {
	go func() {
		blocks := make([][]byte, 64)
		var cold []byte
		for turn := 0; ; turn++ {
			if turn == 50 {
				cold = make([]byte, 8<<20)
				for at := range cold {
					cold[at] = 7
				}
			}
			select {
			case <-asked:
				wrong := 0
				for _, each := range cold {
					if each != 7 {
						wrong++
					}
				}
				answers <- wrong
			default:
			}
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
			time.Sleep(4 * time.Millisecond)
		}
	}()
}

//export Turns
func Turns() int { return turns }

//export Wrong
func Wrong() int {
	asked <- true
	return <-answers
}

func main() {}
