package main

// #include <stdlib.h>
// static int odd(int x) { return x & 1; }
import "C"
import "fmt"

type row struct {
	key  int
	text string
}

func main() {
	groups := map[int][]*row{}
	for i := 0; i < 1200000; i++ {
		key := i * 7919 % 30011
		groups[key] = append(groups[key], &row{i, fmt.Sprint("row ", i%1000)})
	}
	done := make(chan uint64)
	for part := 0; part < 4; part++ {
		go func(part int) {
			sum := uint64(0)
			for key := part; key < 30011; key += 4 {
				for _, r := range groups[key] {
					sum = sum*31 + uint64(r.key) + uint64(len(r.text)) + uint64(C.odd(C.int(r.key)))
				}
			}
			done <- sum
		}(part)
	}
	total := uint64(0)
	for part := 0; part < 4; part++ {
		total += <-done
	}
	fmt.Println(len(groups), total)
}
