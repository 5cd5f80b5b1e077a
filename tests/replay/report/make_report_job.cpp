// Writes a made-up job's journals: make_report_job DIR [--ranks N] [--events N] [--allocations N] [--cycles N] [--fail] [--die]
// [--no-votes]
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/replay/report/report_job.h"

int main(int argc, char** argv) {
  amem::test::ReportJob job;
  const char* directory = nullptr;
  bool understood = argc > 1;
  for (int i = 1; i < argc && understood; ++i) {
    const bool more = i + 1 < argc;
    if (std::strcmp(argv[i], "--fail") == 0) {
      job.fail = true;
    } else if (std::strcmp(argv[i], "--die") == 0) {
      job.die = true;
    } else if (std::strcmp(argv[i], "--no-votes") == 0) {
      job.votes = false;
    } else if (std::strcmp(argv[i], "--cycles") == 0 && more) {
      job.cycles = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--ranks") == 0 && more) {
      job.ranks = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--events") == 0 && more) {
      job.events = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--allocations") == 0 && more) {
      job.allocations = std::atoi(argv[++i]);
    } else if (argv[i][0] != '-' && directory == nullptr) {
      directory = argv[i];
    } else {
      understood = false;
    }
  }
  if (!understood || directory == nullptr || job.ranks < 3 || job.allocations < 1) {
    std::fprintf(
        stderr,
        "usage: make_report_job DIR [--ranks N, 3 or more] [--events N] [--allocations N] [--cycles N] [--fail] [--die] "
        "[--no-votes]\n");
    return 1;
  }
  const amem::Status status = amem::test::WriteReportJob(job, directory);
  if (!status.ok()) std::fprintf(stderr, "make_report_job: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
