// Weights that are mapped from a checkpoint's files: where one becomes shorter, reading it is a bus error, of which a
// process would die without a word.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace {

char last_words[256];
struct sigaction before_mapped_files;

void on_bus_error(int, siginfo_t* info, void*) {
  if (info->si_code == BUS_ADRERR) {
    (void)!write(2, last_words, strlen(last_words));
    _exit(2);
  }
  // Another kind is for who was here before: it happens again at once, unless it was sent.
  sigaction(SIGBUS, &before_mapped_files, nullptr);
  if (info->si_code <= 0) raise(SIGBUS);
}

// Has a read beyond a mapped file's end write `words` to standard error and end the process with 2, as a user's mistake
// does. Python's faulthandler, where it is on, keeps every other bus error.
void watch_mapped_files(std::string words) {
  const bool watched = last_words[0] != 0;
  strncpy(last_words, words.c_str(), sizeof last_words - 1);
  if (watched) return;
  struct sigaction own = {};
  own.sa_sigaction = on_bus_error;
  own.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGBUS, &own, &before_mapped_files);
}

}  // namespace
