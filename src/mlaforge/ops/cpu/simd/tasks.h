// Tasks on all threads.
#pragma once
#include <ATen/Parallel.h>

// Calls task(i) for each i in [0, count): thread k of n takes tasks k, k + n, .... So a task of a second call finds in its
// core's cache what the same task of the first call wrote, and tasks of decreasing length are shared out evenly.
template <typename Task>
void parallel_tasks(int64_t count, Task task) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t i = thread; i < count; i += threads) task(i);
  });
}
