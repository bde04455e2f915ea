module warmwatch/bench/load

go 1.22
