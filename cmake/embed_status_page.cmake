# Writes OUTPUT, a C++ file with the text of INPUT. usage: cmake -D INPUT=... -D OUTPUT=... -P FILE
file(READ "${INPUT}" page)
file(WRITE "${OUTPUT}" "#include \"server/status_page.h\"

namespace ikbo::server {

const std::string_view kStatusPage = R\"ikbo_html(${page})ikbo_html\";

}  // namespace ikbo::server
")
