-- One program per file, named after it without its number: 00_one_process.cpp is build/examples/one_process.
set_group("examples")

for _, file in ipairs(os.files(path.join(os.scriptdir(), "*.cpp"))) do
    target((path.basename(file):gsub("^%d+_", "")))
        set_kind("binary")
        set_targetdir("$(projectdir)/build/examples")
        add_deps("lockstep")
        add_files(file)
        add_syslinks("pthread")
        set_optimize("fastest")
    target_end()
end
